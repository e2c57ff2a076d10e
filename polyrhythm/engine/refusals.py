"""Why an engine refuses a request; each reason has its HTTP status."""

from polyrhythm.http.errors import Refusal


class Refused(Refusal):
    """The request was not run. The message is one short line for the client."""

    status = 400
    param: str | None = None
    """The parameter that is wrong, and a short name for what is wrong, where the API of the request has such things."""
    code: str | None = None


class TooLarge(Refused):
    """The request can never fit this engine."""

    status = 413


class WrongVersion(Refused):
    """The request names another policy version than the loaded one."""

    status = 409


class Unloadable(Refused):
    """The weights of the version are missing or damaged."""

    status = 422


class Reloading(Refused):
    """The weights that the request began with are being replaced; asked again, it gets the new ones."""

    status = 503


class TookTooLong(Refused):
    """The request was not done within its deadline."""

    status = 504


class EngineFailed(Refused):
    """The compute thread has failed or the engine is closed; nothing can be served any more."""

    status = 503
