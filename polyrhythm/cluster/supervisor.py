"""The supervisor of a run: it starts all processes, watches them, restarts engines, and ends everything together."""

import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

from polyrhythm.chaos.processes import StoppedProcesses
from polyrhythm.cluster.fleet.autoscale import Autoscaler
from polyrhythm.cluster.fleet.engine_processes import EngineProcesses
from polyrhythm.cluster.fleet.rank_processes import RankProcesses
from polyrhythm.cluster.launcher import (
    Launcher,
    ProcessSpec,
    RunProcess,
    command_of,
    failed_after_another,
    failed_by_mistake,
)
from polyrhythm.cluster.run_folder import CONDUCTOR_DEADLINE_S, CREDENTIALS_FILE, RunFolder
from polyrhythm.cluster.signals import signals_handled
from polyrhythm.cluster.standalone import is_loopback
from polyrhythm.conductor.engines.cores import CorePlan
from polyrhythm.config import Config
from polyrhythm.devices.plan import ON_CPU, DevicePlan
from polyrhythm.errors import RunError, UserError
from polyrhythm.observe.loggers import CLOSE_DEADLINE_S
from polyrhythm.observe.status import RunStatus
from polyrhythm.observe.terminal.view import NoView, View
from polyrhythm.weights.snapshot import newest_whole_version, writing_deadline_s

POLL_S = 0.2
END_DEADLINE_S = 5.0
SETTLE_S = 0.5
STATUS_DEADLINE_S = 2.0


class Supervisor:
    """`with Supervisor(...) as run: run.watch(view)`. Leaving the block ends every process.

    Without a trainer the loop of somebody else takes its place, in whatever process.
    """

    def __init__(
        self, folder: RunFolder, config: Config, threads: CorePlan, launcher: Launcher, devices: DevicePlan = ON_CPU,
        has_trainer: bool = True,
    ):  # fmt: skip
        self.folder = folder
        self.config = config
        self.threads = threads
        self.launcher = launcher
        self.devices = devices
        self._rank_names = config.training.rank_names[: config.training.num_ranks_here] if has_trainer else []
        self.view: View = NoView()
        self.conductor: RunProcess | None = None
        self.ranks: list[RunProcess] = []
        self._insisted = False
        self._num_notes = 0
        self.stopped = StoppedProcesses(folder.path)
        self.engines = EngineProcesses(
            folder, launcher, threads.engine, config.cluster.max_restarts, self.note, devices
        )
        self.elastic_ranks: RankProcesses | None = None
        if config.training.elastic and has_trainer:
            self.elastic_ranks = RankProcesses(
                folder, launcher, threads.trainer, config.cluster.max_restarts, self.note, devices
            )
        self._last_status: RunStatus | None = None
        self.autoscaler = Autoscaler(
            config.cluster, self.engines, folder.path / "autoscale.jsonl", self.note,
            training=config.training, ranks=self.elastic_ranks,
        )  # fmt: skip

    def __enter__(self) -> "Supervisor":
        try:
            self.conductor = self._start("conductor", "conductor", 1, self.devices.conductor_environment(), "conductor")
            self.engines.start_first([f"engine-{index}" for index in range(self.config.cluster.num_engines)])
            if self.elastic_ranks:
                self.elastic_ranks.start_first(self._rank_names)
            for rank, name in enumerate([] if self.elastic_ranks else self._rank_names):
                device, num_threads = self.devices.rank_environment(rank), self.threads.trainer
                self.ranks.append(self._start(name, "trainer", num_threads, device, "trainer", "--rank", str(rank)))
            self._wait_for_conductor()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(is_interrupted=error is KeyboardInterrupt)

    @property
    def processes(self) -> list[RunProcess]:
        everything = (self.conductor, *self.engines.processes.values(), *self._rank_processes)
        return [process for process in everything if process is not None]

    def watch(self, view: View) -> None:
        """Until the trainer is done. A process whose end ends the run is a RunError or a UserError that names it."""
        self.view = view
        host = self.config.conductor.host
        if not is_loopback(host):
            self.note(
                f"conductor.host={host} is open to other machines: they need the run's token, and nothing is encrypted"
            )
        if num_elsewhere := self.config.training.ranks_elsewhere:
            tokens = self.folder.path / CREDENTIALS_FILE
            self.note(
                f"{num_elsewhere} of {self.config.training.num_ranks} ranks join from elsewhere: "
                f"polyrhythm trainer --join {self.folder.url('conductor')} --token-file {tokens}"
            )
        while not self._is_done():
            self.look()
            time.sleep(POLL_S)

    def _is_done(self) -> bool:
        """The first rank saves the trained model last; if it is elsewhere, nothing else tells that it has."""
        if self.elastic_ranks:
            return self.elastic_ranks.is_done(self._last_status)
        if self._rank_names:
            return all(rank.returncode == 0 for rank in self.ranks)
        return self.folder.num_finished_steps() >= self.config.num_steps and self.folder.trained_model.exists()

    @property
    def _rank_processes(self) -> list[RunProcess]:
        return [*self.ranks, *(self.elastic_ranks.processes.values() if self.elastic_ranks else ())]

    def look(self) -> None:
        """See how everybody is, restart who may be, show it; an end that ends the run is an error, as in `watch`."""
        assert self.conductor is not None
        if self.conductor.returncode is not None or any(rank.returncode for rank in self.ranks):
            raise self._failure()
        self.stopped.look()
        self.engines.start_requested()
        ended = self.engines.ended()
        if self.elastic_ranks:
            self.elastic_ranks.start_requested()
        ended_ranks = self.elastic_ranks.ended() if self.elastic_ranks else []
        if status := self._status():
            self._last_status = status
            self.engines.reconcile(ended, status)
            if self.elastic_ranks:
                self.elastic_ranks.reconcile(ended_ranks, status)
            self.autoscaler.look(status)
            for line in status.notes[self._num_notes :]:
                self.note(line)
            self._num_notes = len(status.notes)
            self.view.update(status)

    def note(self, line: str) -> None:
        """Tell the user, and keep it. Nobody may be left to read it: the terminal is closed, or `| tee` has ended."""
        with contextlib.suppress(OSError), open(self.folder.logs / "supervisor.log", "a") as log:
            print(datetime.now().isoformat(sep=" ", timespec="seconds"), line, file=log)
        with contextlib.suppress(OSError):
            self.view.note(line)

    def close(self, is_interrupted: bool = False) -> None:
        """Ask every process to end, then insist; a second Ctrl-C insists at once. No process is left behind.

        The first rank has time to save what is not saved yet, and the conductor stays for that: the rank may be closing
        a step.
        """
        with signals_handled(self._insist, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            ranks = self._rank_processes
            if is_interrupted and ranks:
                # Of shards nobody holds all of the last step.
                kept = "finished checkpoints" if self.config.training.is_sharded else "the last finished step"
                self.note(f"ending, and keeping {kept}; Ctrl-C again ends at once")
            self.stopped.close()
            for process in self.processes:
                if process is not self.conductor:
                    process.ask_to_end()
            writers = ranks if self.elastic_ranks else ranks[:1]
            self._wait_for(writers, END_DEADLINE_S)
            if self._has_more_to_save():
                self._wait_for(writers, self._checkpoint_deadline_s())
            for process in self.processes:
                if self._insisted and process is not self.conductor:  # it alone has children, and ends them first
                    process.kill()
                else:
                    process.ask_to_end()
            if self.config.observe.loggers:  # jsonl, which every run has, needs no time
                self._wait_for([self.conductor], CLOSE_DEADLINE_S)
            until = time.monotonic() + END_DEADLINE_S
            for process in self.processes:
                process.end(max(0.1, until - time.monotonic()))
            self.folder.remove_snapshots()

    def _insist(self, *_: object) -> None:
        self._insisted = True

    def _has_more_to_save(self) -> bool:
        """Whether a finished step has no checkpoint, or the trained model is not written."""
        num_finished = self.folder.num_finished_steps()
        if num_finished >= self.config.num_steps and not self.folder.trained_model.exists():
            return True
        num_kept = newest_whole_version(self.folder.checkpoints)
        return self.config.training.checkpoint_every > 0 and num_finished > num_kept

    def _wait_for(self, processes: Sequence[RunProcess | None], deadline_s: float) -> None:
        """Until they have ended, or the deadline, or a second Ctrl-C."""
        until = time.monotonic() + deadline_s
        while not self._insisted and time.monotonic() < until and any(p and p.returncode is None for p in processes):
            time.sleep(0.02)

    def _checkpoint_deadline_s(self) -> float:
        """Policy and two moments in fp32, where the model's file may have 16 bits."""
        num_bytes = 6 * sum(file.stat().st_size for file in self.folder.model_dir.glob("*.safetensors"))
        return writing_deadline_s(num_bytes)

    def _start(
        self,
        name: str,
        role: Literal["conductor", "trainer"],
        num_threads: int,
        device: Mapping[str, str],
        *arguments: str,
    ) -> RunProcess:
        return self.launcher.start(ProcessSpec(name, role, command_of(self.folder, *arguments), num_threads, device))

    def _wait_for_conductor(self) -> None:
        assert self.conductor is not None
        until = time.monotonic() + CONDUCTOR_DEADLINE_S
        while self.folder.url("conductor") is None:
            if self.conductor.returncode is not None or time.monotonic() > until:
                raise self._failure()
            time.sleep(0.02)

    def _status(self) -> RunStatus | None:
        try:
            return self.folder.admin(STATUS_DEADLINE_S).status()
        except RunError:
            return None  # if the conductor is gone, the next look at the processes says so

    def _failure(self) -> RunError | UserError:
        """The error that ends the run. It names the processes that failed by themselves, killed ones first.

        The others usually failed after them. A mistake of the user explains everything else.
        """
        time.sleep(SETTLE_S)
        until, failed = time.monotonic() + END_DEADLINE_S, self._failed()
        while failed and all(map(failed_after_another, failed)) and time.monotonic() < until:
            time.sleep(0.1)  # the process that failed first may answer the others before it ends
            failed = self._failed()
        if mistakes := [process for process in failed if failed_by_mistake(process)]:
            return UserError("\n".join(process.describe_end() for process in mistakes))
        causes = [process for process in failed if not failed_after_another(process)] or failed
        if not causes:
            return RunError("the conductor did not start in time")
        causes.sort(key=lambda process: (process.returncode or 0) >= 0)
        return RunError("\n".join(process.describe_end() for process in causes))

    def _failed(self) -> list[RunProcess]:
        """The processes that have ended and should not have; a rank may end when it is done."""
        return [p for p in self.processes if p.returncode or (p.returncode == 0 and p not in self._rank_processes)]
