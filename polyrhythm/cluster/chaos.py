"""What a chaos plan does to trainer and conductor, and how stopped processes go on."""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from polyrhythm.chaos import SIGNALS, SNAPSHOTS, Fault, Faults, damage, read_witness
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.errors import RunError
from polyrhythm.observe.lane import Lane
from polyrhythm.wire import TrainerReport

MAX_BALLAST_BYTES = 2**30
BALLAST_FILE = "ballast"


class ChaosLane(Lane):
    """A rank's lane, which knows the moments: before or after an activity, faults strike this rank.

    Those of the conductor strike at moments of the first rank.
    """

    def __init__(self, name: str, send: Callable[[TrainerReport], None], run: RunFolder, *, is_first: bool = True):
        super().__init__(name, send)
        self._run = run
        struck = (name, "conductor") if is_first else (name,)
        self._faults = [(who, faults) for who in struck if (faults := run.faults(who))]
        self._step = run.first_step - 1

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        self._step += what == "load"
        due = [(who, faults, fault) for who, faults in self._faults if (fault := faults.due(what, self._step))]
        for who, faults, fault in due:
            if fault.what in SIGNALS:
                pid = self._run.pid("conductor") if who == "conductor" else os.getpid()
                faults.witness(fault, self._step, f"at {what}", pid)
                os.kill(pid, signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)
            elif fault.what == "disk_full":
                self._fill_disk(faults, fault)
        with super().doing(what):
            yield
        for _, faults, fault in due:
            if fault.what in SNAPSHOTS:
                path = _newest_snapshot(self._run.store_root)
                faults.witness(fault, self._step, str(path.parent.name))
                damage(path, fault.what)

    def _fill_disk(self, faults: Faults, fault: Fault) -> None:
        """Leave no room where snapshots are published; a ballast file takes it, beside the snapshots."""
        root = self._run.store_root
        free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
        if free > MAX_BALLAST_BYTES:
            raise RunError(f"disk_full would write {free} bytes to {root}: set weights.root to a small file system")
        faults.witness(fault, self._step, f"{free} bytes were free in {root}")
        try:
            with open(root / BALLAST_FILE, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


class Reviver:
    """Lets processes that a plan has stopped go on when their time has come; `close` all of them, so that they can end."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._num_read = len(read_witness(run_dir))
        self._stopped: list[tuple[float, int]] = []

    def look(self) -> None:
        lines = read_witness(self._run_dir)
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


def _newest_snapshot(root: Path) -> Path:
    return max(root.glob("v????????")) / "model.safetensors"
