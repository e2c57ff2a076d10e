"""Processes that a chaos plan has stopped go on when their time has come."""

import contextlib
import os
import signal
import time
from pathlib import Path

from polyrhythm.chaos.plan import PLAN_FILE, read_fault_log


class StoppedProcesses:
    """The supervisor's hook: `look` now and then, and `close` so that all stopped processes go on and can end.

    It does nothing in a run without a chaos plan.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._has_plan = (run_dir / PLAN_FILE).exists()
        self._num_read = len(read_fault_log(run_dir))
        self._stopped: list[tuple[float, int]] = []

    def look(self) -> None:
        if not self._has_plan:
            return
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
