"""What goes wrong between a client and a server, as each of them sees it."""

MAX_SAID_CHARS = 300


class Refusal(Exception):
    """A server's expected trouble. The client is told the message in one line, with this status."""

    status = 400


class CallFailed(Exception):
    """A client's call brought no answer that can be used. The message says who was asked and what came of it."""


class NoAnswer(CallFailed):
    """Nobody is there, the connection broke, or what came was no HTTP."""


class DeadlinePassed(NoAnswer):
    """The whole answer was not there in time."""


class AnswerTooLarge(NoAnswer):
    """More bytes came than an honest answer has."""


class ErrorReply(CallFailed):
    """The server answered with a status other than 200; `said` is its reason, shortened."""

    def __init__(self, peer: str, status: int, body: bytes):
        self.status = status
        self.said = body.decode(errors="replace").strip()[:MAX_SAID_CHARS]
        super().__init__(f"{peer} answered {status}: {self.said}")
