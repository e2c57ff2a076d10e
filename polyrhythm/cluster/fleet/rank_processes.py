"""The elastic ranks that this run has started: restarted when they die, within a budget, and ended when they are let go."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from polyrhythm.cluster.fleet.restarts import Restarts
from polyrhythm.cluster.launcher import Launcher, ProcessSpec, RunProcess, command_of, failed_by_mistake
from polyrhythm.cluster.run_folder import RANK, RunFolder
from polyrhythm.devices.plan import ON_CPU, DevicePlan
from polyrhythm.errors import RunError, UserError
from polyrhythm.observe.status import RunStatus


class RankProcesses:
    """Rank processes by name. To the autoscaler they are what EngineProcesses are: `start` adds one, `stop` drains one."""

    def __init__(
        self, folder: RunFolder, launcher: Launcher, num_threads: int, max_restarts: int, note: Callable[[str], None],
        devices: DevicePlan = ON_CPU,
    ):  # fmt: skip
        self.processes: dict[str, RunProcess] = {}
        self._folder = folder
        self._launcher = launcher
        self._num_threads = num_threads
        self._restarts = Restarts(max_restarts, note)
        self._note = note
        self._devices = devices
        self._leaving: set[str] = set()
        self._given_up: list[RunProcess] = []
        self._started_at: dict[str, float] = {}

    @property
    def names(self) -> list[str]:
        """The ranks that are here to stay, in the order they were started."""
        return [name for name in self.processes if name not in self._leaving]

    def start_first(self, names: Iterable[str]) -> None:
        for name in names:
            self.start(name)

    def start(self, name: str) -> None:
        rank = self._folder.config().training.rank_of(name)
        num_devices = len(self._devices.found.devices)
        if self._devices.kind != "cpu" and rank >= num_devices:
            raise RunError(f"{name} would need a device of its own, and there are {num_devices}")
        command = command_of(self._folder, "trainer", "--rank", str(rank))
        environment = self._devices.rank_environment(rank)
        self._started_at[name] = time.time()
        self.processes[name] = self._launcher.start(
            ProcessSpec(name, "trainer", command, self._num_threads, environment)
        )

    def stop(self, name: str) -> None:
        """Let a rank finish the update that is being made, and no more."""
        self._folder.admin().drain_rank(name)
        self._leaving.add(name)

    def start_requested(self) -> None:
        """Start the ranks that were asked for with `polyrhythm ranks add`. One that cannot be changes nothing for the others."""
        for name in self._folder.take_requests(RANK):
            if name in self.processes:
                continue
            try:
                self.start(name)
                self._note(f"{name} is started: it was asked for")
            except RunError as error:
                self._note(f"{name} was asked for and is not started: {error}")

    def ended(self) -> list[RunProcess]:
        return [process for process in self.processes.values() if process.returncode is not None]

    def reconcile(self, ended: list[RunProcess], status: RunStatus) -> None:
        """Restart those that died, and end those that the conductor has given up.

        UserError for a mistake of the user that shows before the first step is finished, RunError when no rank is left.
        """
        for name, lost_at in status.lost_ranks.items():
            process = self.processes.get(name)
            if process is not None and process.returncode is None and lost_at > self._started_at[name]:
                self._note(f"{name} is given up: its process is killed")
                process.kill()
        for process in ended:
            self._handle_end(process, status)
        if not self.processes and not self.is_done(status) and not status.ranks and status.failure is None:
            causes = [process.describe_end() for process in self._given_up]
            raise RunError("\n".join(causes) or "no rank of the trainer is left: go on from the last checkpoint")

    def is_done(self, status: RunStatus | None) -> bool:
        """Whether every rank of this machine has ended and the trained model is there, which one from elsewhere may save."""
        is_finished = status is not None and status.is_finished
        return not self.processes and is_finished and self._folder.trained_model.exists()

    def _handle_end(self, process: RunProcess, status: RunStatus) -> None:
        name = process.name
        if process.returncode == 0:
            del self.processes[name]
            self._leaving.discard(name)
            if not status.is_finished:
                self._note(f"{name} has left the run")
            return
        if status.failure is not None:
            return  # it fell with the run
        if failed_by_mistake(process) and status.num_finished_steps == status.first_step:
            raise UserError(process.describe_end())
        with suppress(RunError):  # the conductor has noticed by itself, or will
            self._folder.admin().rank_ended(name)
        if failed_by_mistake(process):
            self._note(f"{process.describe_end()}: it would fail in the same way again, so it stays away")
            self._given_up.append(self.processes.pop(name))
        elif self._restarts.allow(process):
            self.start(name)
        else:
            self._restarts.give_up(process)
            self._given_up.append(self.processes.pop(name))
