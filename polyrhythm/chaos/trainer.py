"""What a chaos plan does to the trainer and, at the trainer's moments, to the conductor."""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from polyrhythm.chaos.plan import SIGNALS, SNAPSHOTS, Fault, Faults, damage, faults_of
from polyrhythm.errors import RunError
from polyrhythm.observe.activity import Activity

MAX_BALLAST_BYTES = 2**30
BALLAST_FILE = "ballast"
FILE_POLL_S = 0.05


def trainer_hooks(
    run_dir: Path, name: str, rank: int, store_root: Path, conductor_pid: Callable[[], int], first_step: int
) -> "list[FaultyTrainer]":
    """The hooks of a rank's recorder: one in a run with a chaos plan, none in any other."""
    struck = (name, "conductor") if rank == 0 else (name,)
    faults = {who: faults for who in struck if (faults := faults_of(run_dir, who))}
    return [FaultyTrainer(faults, store_root, conductor_pid, first_step)] if faults else []


class FaultyTrainer:
    """A hook of a rank's recorder: before or after an activity, faults strike this rank.

    Those of the conductor strike at moments of the first rank.
    """

    def __init__(self, faults: dict[str, Faults], store_root: Path, conductor_pid: Callable[[], int], first_step: int):
        self._faults = list(faults.items())
        self._store_root = store_root
        self._conductor_pid = conductor_pid
        self._step = first_step - 1
        self._due: list[tuple[str, Faults, Fault]] = []
        self._began_s = 0.0

    def begins_at(self, step: int) -> None:
        """Elastic ranks may begin later than the run."""
        self._step = step - 1

    def before(self, activity: Activity) -> None:
        self._step += activity is Activity.LOAD
        due = ((who, faults, faults.due(activity, self._step)) for who, faults in self._faults)
        self._due = [(who, faults, fault) for who, faults, fault in due if fault]
        self._began_s = time.monotonic()
        for who, faults, fault in self._due:
            if fault.what in SIGNALS:
                pid = self._conductor_pid() if who == "conductor" else os.getpid()
                faults.record(fault, self._step, f"at {activity}", pid)
                os.kill(pid, signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)
            elif fault.what == "disk_full":
                self._fill_disk(faults, fault)
            elif fault.what == "slow":
                faults.record(fault, self._step, f"at {activity}")
                _hold(fault)

    def after(self, activity: Activity) -> None:
        for _, faults, fault in self._due:
            if fault.what in SNAPSHOTS:
                path = _newest_snapshot(self._store_root)
                faults.record(fault, self._step, str(path.parent.name))
                damage(path, fault.what)
            elif fault.what == "slow":
                time.sleep((fault.factor - 1) * (time.monotonic() - self._began_s))

    def _fill_disk(self, faults: Faults, fault: Fault) -> None:
        """Leave no room where snapshots are published; a ballast file takes it, beside the snapshots."""
        root = self._store_root
        free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
        if free > MAX_BALLAST_BYTES:
            raise RunError(f"disk_full would write {free} bytes to {root}: set weights.root to a small file system")
        faults.record(fault, self._step, f"{free} bytes were free in {root}")
        try:
            with open(root / BALLAST_FILE, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def _hold(fault: Fault) -> None:
    """What comes next comes later: after a time, or when a file exists."""
    time.sleep(fault.for_s)
    while fault.until and not Path(fault.until).exists():
        time.sleep(FILE_POLL_S)


def _newest_snapshot(root: Path) -> Path:
    return max(max(root.glob("v????????")).glob("*.safetensors"))
