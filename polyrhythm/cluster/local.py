"""All processes of a run on this machine: started, watched, ended together."""

import contextlib
import signal
import subprocess
import time
from datetime import datetime
from typing import Any

from polyrhythm.cluster.autoscale import Autoscaler
from polyrhythm.cluster.chaos import Reviver
from polyrhythm.cluster.fleet import Fleet
from polyrhythm.cluster.part import Part, start_part
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.cluster.signals import signals_handled
from polyrhythm.conductor.cores import CorePlan
from polyrhythm.config import Config
from polyrhythm.errors import ConductorFailed, RunError
from polyrhythm.observe.view import NoView, View

POLL_S = 0.2
CONDUCTOR_DEADLINE_S = 60.0
END_DEADLINE_S = 5.0
SETTLE_S = 0.5
STATUS_DEADLINE_S = 2.0


class LocalRun:
    """`with LocalRun(...) as run: run.watch(view)`. Leaving the block ends every process."""

    def __init__(self, folder: RunFolder, config: Config, threads: CorePlan):
        self.folder = folder
        self.config = config
        self.threads = threads
        self.view: View = NoView()
        self.conductor: Part | None = None
        self.trainer: Part | None = None
        self.reviver = Reviver(folder.path) if folder.faults("supervisor") else None
        self.fleet = Fleet(folder, threads.engine, config.engine.max_restarts, self.note)
        self.autoscaler = Autoscaler(config.engine, self.fleet, folder.path / "autoscale.jsonl", self.note)

    def __enter__(self) -> "LocalRun":
        try:
            self.conductor = start_part(self.folder, "conductor", ["conductor"], 1)
            self._wait_for_conductor()
            for index in range(self.config.engine.num):
                self.fleet.start(f"engine-{index}")
            self.trainer = start_part(self.folder, "trainer", ["trainer"], self.threads.trainer)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def parts(self) -> list[Part]:
        return [part for part in (self.conductor, *self.fleet.parts.values(), self.trainer) if part is not None]

    def watch(self, view: View) -> None:
        """Until the trainer is done. A conductor or trainer that ends badly is a RunError that names it."""
        assert self.conductor is not None and self.trainer is not None
        self.view = view
        while self.trainer.returncode != 0:
            if self.conductor.returncode is not None or self.trainer.returncode is not None:
                raise RunError(self._what_happened())
            if self.reviver:
                self.reviver.look()
            self.fleet.start_requested()
            ended = self.fleet.ended()
            if status := self._status():
                self.fleet.tend(ended, status)
                self.autoscaler.look(status)
                view.update(status)
            time.sleep(POLL_S)

    def note(self, line: str) -> None:
        """Tell the user, and keep it."""
        with open(self.folder.logs / "supervisor.log", "a") as log:
            print(datetime.now().isoformat(sep=" ", timespec="seconds"), line, file=log)
        self.view.note(line)

    def close(self) -> None:
        """Ask every part to end, then insist. It takes seconds: a second Ctrl-C must not leave processes behind."""
        with signals_handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if self.reviver:
                self.reviver.close()
            for part in self.parts:
                part.ask_to_end()
            until = time.monotonic() + END_DEADLINE_S
            for part in self.parts:
                part.end(max(0.1, until - time.monotonic()))
            self.folder.remove_snapshots()

    def _wait_for_conductor(self) -> None:
        assert self.conductor is not None
        until = time.monotonic() + CONDUCTOR_DEADLINE_S
        while self.folder.url("conductor") is None:
            if self.conductor.returncode is not None or time.monotonic() > until:
                raise RunError(self._what_happened())
            time.sleep(0.02)

    def _status(self) -> dict[str, Any] | None:
        try:
            return self.folder.admin(STATUS_DEADLINE_S).status()
        except RunError:
            return None  # if the conductor is gone, the next look at the processes says so

    def _what_happened(self) -> str:
        """Name the parts that ended, those killed by a signal first: the others usually fell after them."""
        time.sleep(SETTLE_S)
        named = self.parts
        if self.trainer and (self.trainer.returncode == 0 or self._conductor_took_trainer_along()):
            named.remove(self.trainer)
        ended = [part for part in named if part.returncode is not None]
        if not ended:
            return "the conductor did not start in time"
        ended.sort(key=lambda part: (part.returncode or 0) >= 0)
        return "\n".join(part.obituary() for part in ended)

    def _conductor_took_trainer_along(self) -> bool:
        """Whether the trainer says so by its exit code, and the conductor, which answers it first, then ends as well."""
        assert self.conductor is not None and self.trainer is not None
        if self.trainer.returncode != ConductorFailed.exit_code:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.conductor.process.wait(END_DEADLINE_S)
        return self.conductor.returncode is not None
