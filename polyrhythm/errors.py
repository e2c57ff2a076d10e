"""The two ways a run ends badly: the user's mistake (exit code 2) and a failing part (exit code 1)."""


class UserError(Exception):
    """A mistake in a configuration, a file or a flag. The message names the key, the value and the fix."""


class RunError(Exception):
    """A part of the running system failed. The message names the part and the cause."""
