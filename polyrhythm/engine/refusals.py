"""Why an engine refuses a request; each reason has its HTTP status."""


class Refused(Exception):
    """The request was not run. The message is one short line for the client."""

    status = 400


class TooLarge(Refused):
    """The request can never fit this engine."""

    status = 413


class WrongVersion(Refused):
    """The request names another policy version than the loaded one."""

    status = 409


class Busy(Refused):
    """Weights are loaded only while no request runs."""

    status = 409


class EngineFailed(Refused):
    """The compute thread has failed or the engine is closed; nothing can be served any more."""

    status = 503
