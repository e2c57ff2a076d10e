"""Checkpoints are written by a thread, from a copy in memory: training goes on as soon as the copy is made."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from polyrhythm.errors import RunError
from polyrhythm.training.parallel.channel import Channel
from polyrhythm.training.parallel.writing import write_together
from polyrhythm.weights.export import Rows
from polyrhythm.weights.snapshot import writing_deadline_s
from polyrhythm.weights.store import WeightStore

SPARE = 1.5
"""A copy is made if so many times its size are free: forward and backward passes need room too."""
CGROUP = Path("/sys/fs/cgroup")

log = logging.getLogger(__name__)


class CheckpointWriter:
    """One checkpoint at a time. What fails in the thread is a RunError in the next `begin`, `check` or `finish`."""

    def __init__(self, store: WeightStore, writers: Channel | None = None):
        self._store = store
        self._writers = writers or Channel()
        self._thread: threading.Thread | None = None
        self._version, self._deadline_s = 0, 0.0
        self._failure: Exception | None = None

    def begin(self, rows: Sequence[Rows], version: int) -> None:
        """Write a copy of these rows as `version` while the caller goes on; at once if there is no room for a copy."""
        self.finish()
        num_bytes = sum(part.rows.nbytes for part in rows)
        if (free := free_memory()) < SPARE * num_bytes:
            log.info("training waits for the checkpoint of step %d: a copy of %d bytes leaves too little of %d",
                     version, num_bytes, free)  # fmt: skip
            self.write(rows, version)
            return
        copies = [part._replace(rows=part.rows.detach().to("cpu", copy=True)) for part in rows]
        self._version, self._deadline_s = version, writing_deadline_s(num_bytes)
        self._thread = threading.Thread(target=self._run, args=(copies, version), name="checkpoint", daemon=True)
        self._thread.start()

    def write(self, rows: Sequence[Rows], version: int) -> None:
        """When this returns in the first of the writers the checkpoint is there."""
        write_together(self._store, rows, version, self._writers)

    def check(self) -> None:
        """Raise what has failed."""
        if (failure := self._failure) is not None:
            self._failure = None
            raise RunError(
                f"the checkpoint of step {self._version} could not be written: {failure}; go on with --resume from the one before"
            ) from failure

    def finish(self) -> None:
        """Until the checkpoint that was begun is there."""
        if self._thread is not None:
            self._thread.join(self._deadline_s)
            if self._thread.is_alive():
                raise RunError(
                    f"the checkpoint of step {self._version} was not written within {self._deadline_s:.0f} s: "
                    f"is the disk of {self._store.root} too slow or gone?"
                )
            self._thread = None
        self.check()

    def _run(self, copies: Sequence[Rows], version: int) -> None:
        try:
            self.write(copies, version)
        except Exception as error:  # whatever it is, the training thread must hear of it
            self._failure = error


def free_memory() -> int:
    """Bytes that this process may still take, by the machine and by its container."""
    free = psutil.virtual_memory().available
    try:
        limit, used = (CGROUP / "memory.max").read_text(), (CGROUP / "memory.current").read_text()
        cached = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())["inactive_file"]
    except (OSError, KeyError):  # no control group of this version
        return free
    return free if limit.strip() == "max" else min(free, int(limit) - int(used) + int(cached))
