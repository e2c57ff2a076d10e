"""Why the conductor refuses a request; each reason has its HTTP status."""

from polyrhythm.http.errors import Refusal


class Conflict(Refusal):
    """A request that does not fit the state of the run."""

    status = 409


class Unfit(Refusal):
    """Whoever asks cannot take part in this run; to ask again is of no use."""

    status = 412


class Dismissed(Refusal):
    """The engine is not wanted any more and may end."""

    status = 410


class RunFailed(Refusal):
    """The run has failed; the message is the cause."""

    status = 503
