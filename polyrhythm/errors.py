"""The two ways a run ends badly: the user's mistake and a failing part."""


class UserError(Exception):
    """A mistake in a configuration, a file or a flag. The message names the key, the value and the fix."""

    exit_code = 2


class RunError(Exception):
    """A part of the running system failed. The message names the part and the cause."""

    exit_code = 1


class LetGo(RunError):
    """The run does not want this rank any more: it was drained or removed, or the run is over. No fault of anybody."""

    exit_code = 0


class AnotherFailed(RunError):
    """Another part failed, and who needs it after it: the exit code tells the supervisor not to blame this one."""

    exit_code = 4
