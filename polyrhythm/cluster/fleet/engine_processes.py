"""The engines that this run has started: restarted when they die, within a budget, and ended when they are let go."""

from collections.abc import Callable, Iterable

from polyrhythm.cluster.fleet.restarts import Restarts
from polyrhythm.cluster.launcher import Launcher, ProcessSpec, RunProcess, command_of, failed_by_mistake
from polyrhythm.cluster.run_folder import ENGINE, RunFolder
from polyrhythm.devices.plan import ON_CPU, DevicePlan
from polyrhythm.errors import RunError, UserError
from polyrhythm.observe.status import EngineState, EngineView, RunStatus


class EngineProcesses:
    """Engine processes by name. `note` is told, in one line, what was done and why.

    These are the Scalable of the autoscaler: `start` makes a process that joins the run, `stop` drains it, which
    ends its process.
    """

    def __init__(
        self, folder: RunFolder, launcher: Launcher, num_threads: int, max_restarts: int, note: Callable[[str], None],
        devices: DevicePlan = ON_CPU,
    ):  # fmt: skip
        self.processes: dict[str, RunProcess] = {}
        self._folder = folder
        self._launcher = launcher
        self._num_threads = num_threads
        self._restarts = Restarts(max_restarts, note)
        self._leaving: set[str] = set()
        self._unproven: set[str] = set()
        self._given_up: dict[str, RunProcess] = {}
        self._note = note
        self._devices = devices
        self._places: dict[str, int | None] = {}

    @property
    def names(self) -> list[str]:
        """The engines that are here to stay, in the order they were started."""
        return [name for name in self.processes if name not in self._leaving]

    def start_first(self, names: Iterable[str]) -> None:
        """Start the engines that the run begins with. A mistake of the user shows in them before they have served."""
        for name in names:
            self._unproven.add(name)
            self.start(name)

    def start(self, name: str) -> None:
        self._folder.forget_announcement(name)
        self._given_up.pop(name, None)
        command = command_of(self._folder, "engine", "--name", name)
        environment = self._devices.engine_environment(self._place(name))
        self.processes[name] = self._launcher.start(
            ProcessSpec(name, "engine", command, self._num_threads, environment)
        )

    def _place(self, name: str) -> int | None:
        """Its device: the one it had before, or the one with the fewest engines."""
        if name not in self._places:
            taken = [place for other, place in self._places.items() if other in self.processes]
            self._places[name] = self._devices.place_for_engine(taken)
        return self._places[name]

    def stop(self, name: str) -> None:
        """Let an engine finish what it has, and no more."""
        self._folder.admin().drain(name)
        self._leaving.add(name)

    def ended(self) -> list[RunProcess]:
        return [process for process in self.processes.values() if process.returncode is not None]

    def start_requested(self) -> None:
        """Start the engines that were asked for with `polyrhythm engines add`."""
        for name in self._folder.take_requests(ENGINE):
            if name not in self.processes:
                self._note(f"{name} is started: it was asked for")
                self.start(name)

    def reconcile(self, ended: list[RunProcess], status: RunStatus) -> None:
        """Make the processes follow what the conductor has decided, and restart those that died.

        `status` must be newer than `ended`, so that it says which of them were meant to end. UserError for a mistake of
        the user that concerns the run and not one late engine, RunError when there is no engine left.
        """
        for engine in status.engines:
            process = self.processes.get(engine.name)
            if process is not None and engine.url == self._folder.url(process.name):
                self._follow(process, engine)
        serving = {engine.name for engine in status.engines if _serves(engine)} - {process.name for process in ended}
        for process in ended:
            self._handle_end(process, is_served=bool(serving))
        if self._given_up and not self.processes and not self._others(status):
            raise RunError("\n".join(process.describe_end() for process in self._given_up.values()))

    def _follow(self, process: RunProcess, engine: EngineView) -> None:
        """Do with a process what the conductor has decided about its engine."""
        if _serves(engine):
            self._unproven.discard(process.name)
        if engine.state is EngineState.DRAINING or engine.is_dismissed:
            self._leaving.add(process.name)
        if engine.state is EngineState.GONE and engine.is_dismissed:
            process.ask_to_end()
        elif engine.state is EngineState.GONE and process.returncode is None:
            self._note(f"{process.name} is given up ({engine.cause}): its process is killed")
            process.kill()

    def _handle_end(self, process: RunProcess, is_served: bool) -> None:
        if process.name in self._leaving:
            self._leaving.discard(process.name)
            self._note(f"{process.name} has left the run")
            del self.processes[process.name]
        elif failed_by_mistake(process):
            if not is_served or process.name in self._unproven or self._restarts.max_restarts == 0:
                raise UserError(process.describe_end())
            self._given_up[process.name] = self.processes.pop(process.name)
            self._note(f"{process.describe_end()}: it would fail in the same way again, so it stays away")
        elif self._restarts.max_restarts == 0:
            raise RunError(process.describe_end())
        elif self._restarts.allow(process):
            self.start(process.name)
        else:
            self._given_up[process.name] = self.processes.pop(process.name)
            self._restarts.give_up(process)

    def _others(self, status: RunStatus) -> list[str]:
        """Engines of the run that were started elsewhere."""
        present = [engine.name for engine in status.engines if engine.state is not EngineState.GONE]
        return [name for name in present if name not in self._given_up]


def _serves(engine: EngineView) -> bool:
    """Whether it has held a policy, and is ready or will be as soon as it has loaded the next one."""
    trusted = (EngineState.LOADING, EngineState.READY, EngineState.SUSPECT)
    return engine.policy_version is not None and engine.state in trusted
