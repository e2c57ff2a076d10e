"""All processes of a run on this machine: started, watched, ended together."""

import signal
import time
from datetime import datetime
from typing import Any

from polyrhythm.chaos.processes import StoppedProcesses
from polyrhythm.cluster.autoscale import Autoscaler
from polyrhythm.cluster.engine_processes import EngineProcesses
from polyrhythm.cluster.process import ManagedProcess, start_process
from polyrhythm.cluster.run_folder import CONDUCTOR_DEADLINE_S, RunFolder
from polyrhythm.cluster.signals import signals_handled
from polyrhythm.conductor.engines.cores import CorePlan
from polyrhythm.config import Config
from polyrhythm.errors import AnotherFailed, RunError
from polyrhythm.observe.terminal.view import NoView, View

POLL_S = 0.2
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
        self.conductor: ManagedProcess | None = None
        self.ranks: list[ManagedProcess] = []
        self.stopped = StoppedProcesses(folder.path) if folder.faults("supervisor") else None
        self.engines = EngineProcesses(folder, threads.engine, config.cluster.max_restarts, self.note)
        self.autoscaler = Autoscaler(config.cluster, self.engines, folder.path / "autoscale.jsonl", self.note)

    def __enter__(self) -> "LocalRun":
        try:
            self.conductor = start_process(self.folder, "conductor", ["conductor"], 1)
            for index in range(self.config.cluster.num_engines):
                self.engines.start(f"engine-{index}")
            for rank, name in enumerate(self.config.training.rank_names):
                command = ["trainer", "--rank", str(rank)]
                self.ranks.append(start_process(self.folder, name, command, self.threads.trainer))
            self._wait_for_conductor()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def parts(self) -> list[ManagedProcess]:
        return [part for part in (self.conductor, *self.engines.parts.values(), *self.ranks) if part is not None]

    def watch(self, view: View) -> None:
        """Until the trainer is done. A conductor or rank that ends badly is a RunError that names it."""
        assert self.conductor is not None
        self.view = view
        while any(rank.returncode != 0 for rank in self.ranks):
            if self.conductor.returncode is not None or any(rank.returncode for rank in self.ranks):
                raise RunError(self._what_happened())
            if self.stopped:
                self.stopped.look()
            self.engines.start_requested()
            ended = self.engines.ended()
            if status := self._status():
                self.engines.supervise(ended, status)
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
            if self.stopped:
                self.stopped.close()
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
        """Name the parts that failed by themselves, those killed by a signal first: the others usually fell after them."""
        time.sleep(SETTLE_S)
        until, failed = time.monotonic() + END_DEADLINE_S, self._failed()
        while failed and all(map(_failed_after_another, failed)) and time.monotonic() < until:
            time.sleep(0.1)  # whoever they fell after answers first and ends then
            failed = self._failed()
        causes = [part for part in failed if not _failed_after_another(part)] or failed
        if not causes:
            return "the conductor did not start in time"
        causes.sort(key=lambda part: (part.returncode or 0) >= 0)
        return "\n".join(part.describe_end() for part in causes)

    def _failed(self) -> list[ManagedProcess]:
        """The parts that have ended and should not have; a rank may end when it is done."""
        return [part for part in self.parts if part.returncode or (part.returncode == 0 and part not in self.ranks)]


def _failed_after_another(part: ManagedProcess) -> bool:
    return part.returncode == AnotherFailed.exit_code
