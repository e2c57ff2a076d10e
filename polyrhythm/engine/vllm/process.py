"""A private vLLM server: on a unix socket in a folder that only this user can open, and gone when we are."""

import contextlib
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from polyrhythm.errors import RunError, UserError

GUARD = Path(__file__).with_name("guard.py")
END_DEADLINE_S = 10.0
WRONG_USAGE = 2
"""The exit code of a program that does not understand its command line."""

log = logging.getLogger(__name__)


class VllmProcess:
    """`with VllmProcess(...) as process:` starts it; leaving the block ends the server and everything it has started.

    It writes to our own standard output and error.
    """

    def __init__(self, command_for: Callable[[Path], list[str]], variables_for: Callable[[Path], dict[str, str]]):
        self._folder = Path(tempfile.mkdtemp(prefix="polyrhythm-vllm-"))  # of mode 0700
        self.socket = self._folder / "server"
        self._command = command_for(self.socket)
        self._variables = variables_for(self._folder)

    def __enter__(self) -> "VllmProcess":
        log.info("starting %s", " ".join(self._command))
        self._guard = subprocess.Popen(
            [sys.executable, "-S", str(GUARD), *self._command], stdin=subprocess.PIPE, env=self._variables
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()  # the guard kills the server's processes and ends
        try:
            self._guard.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            log.warning("the guard of vLLM (pid %d) has not ended in %g s", self._guard.pid, END_DEADLINE_S)
            self._guard.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def check_runs(self) -> None:
        """Raises with how it ended, if it did."""
        code = self._guard.poll()
        if code == WRONG_USAGE:
            raise UserError("vLLM does not understand its options: see its message above, and engine.options")
        if code is not None:
            raise RunError(f"vLLM has ended with exit code {code}")
