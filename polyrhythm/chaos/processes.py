"""Processes that a chaos plan has stopped go on when their time has come."""

import contextlib
import os
import signal
import time
from pathlib import Path

from polyrhythm.chaos.plan import read_fault_log


class StoppedProcesses:
    """Lets processes that a plan has stopped go on when their time has come; `close` all of them, so that they can end."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._num_read = len(read_fault_log(run_dir))
        self._stopped: list[tuple[float, int]] = []

    def look(self) -> None:
        lines = read_fault_log(self._run_dir)
        for line in lines[self._num_read :]:
            if line["what"] == "stop":
                self._stopped.append((line["time"] + (line["for_s"] or float("inf")), line["pid"]))
        self._num_read = len(lines)
        self._let_go_on(time.time())

    def close(self) -> None:
        self.look()
        self._let_go_on(float("inf"))

    def _let_go_on(self, now_s: float) -> None:
        for _, pid in [stopped for stopped in self._stopped if stopped[0] <= now_s]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped = [stopped for stopped in self._stopped if stopped[0] > now_s]
