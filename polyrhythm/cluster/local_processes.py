"""The launcher of `cluster.kind = "local"`: processes of this machine, and how they end when their parent does.

The parent keeps the other end of a child's standard input open and never writes to it. When the parent is gone, even by
SIGKILL, the child's read returns and the child leaves.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from polyrhythm.cluster.cores import process_environment
from polyrhythm.cluster.launcher import ProcessSpec, describe_end
from polyrhythm.cluster.run_folder import RunFolder

KILL_DEADLINE_S = 5.0
PARENT_WATCHED = "POLYRHYTHM_PARENT"
ANNOUNCED_TO = "POLYRHYTHM_ANNOUNCE"
"""A descriptor on which a parent without the run's folder waits for the address at which its child serves."""
ORPHANED_EXIT_CODE = 3

log = logging.getLogger(__name__)


class LocalLauncher:
    """Starts processes on this machine; each writes to its own file in the run's `logs`."""

    def __init__(self, folder: RunFolder):
        self._logs = folder.logs

    def start(self, spec: ProcessSpec) -> "LocalProcess":
        log = self._logs / f"{spec.name}.log"
        with open(log, "ab") as file:
            process = subprocess.Popen(
                spec.command, stdin=subprocess.PIPE, stdout=file, stderr=file,
                env={**process_environment(spec.num_threads), **spec.environment, PARENT_WATCHED: "stdin"},
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then ends the others in order
            )  # fmt: skip
        return LocalProcess(spec.name, process, log)

    def close(self) -> None:
        """It has started nothing but processes."""


@dataclass
class LocalProcess:
    """A process of this machine, and the log it writes to."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    asked_at_s: float | None = None
    """When it was asked to end."""

    @property
    def returncode(self) -> int | None:
        return self.process.poll()

    def ask_to_end(self) -> None:
        now_s = time.monotonic()
        if self.asked_at_s is None:
            self.asked_at_s = now_s
            if self.returncode is None:
                self.process.send_signal(signal.SIGTERM)
        elif now_s - self.asked_at_s > KILL_DEADLINE_S and self.returncode is None:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        try:
            self.process.wait(KILL_DEADLINE_S)
        except subprocess.TimeoutExpired:  # the kernel holds it; the others must end all the same
            log.warning("%s (pid %d) has not ended %g s after SIGKILL", self.name, self.process.pid, KILL_DEADLINE_S)

    def end(self, deadline_s: float) -> None:
        try:
            self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
        if self.process.stdin:
            self.process.stdin.close()

    def describe_end(self) -> str:
        return describe_end(self.name, self.returncode or 0, self.log)


def leave_with_parent() -> None:
    """Called by a child: end when the launcher's process ends. Does nothing in a process that a user has started."""
    if os.environ.pop(PARENT_WATCHED, "") == "stdin":
        threading.Thread(target=_leave_when_closed, name="parent-watch", daemon=True).start()


def announce_to_parent(url: str) -> None:
    """Called by a child that serves at `url`. Does nothing if nobody waits for that."""
    if descriptor := os.environ.pop(ANNOUNCED_TO, ""):
        with open(int(descriptor), "w") as pipe:
            pipe.write(url)


def _leave_when_closed() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(ORPHANED_EXIT_CODE)
