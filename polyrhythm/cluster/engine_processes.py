"""The engines of this machine: started, started again when they die, within a budget, and ended when they are let go."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from polyrhythm.cluster.process import ManagedProcess, start_process
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.errors import RunError


class EngineProcesses:
    """Engine processes by name. `note` is told, in one line, what was done and why.

    A Launcher of the autoscaler: `start` makes a process that joins the run, `stop` drains it, which ends its process.
    """

    def __init__(self, folder: RunFolder, num_threads: int, max_restarts: int, note: Callable[[str], None]):
        self.parts: dict[str, ManagedProcess] = {}
        self._folder = folder
        self._num_threads = num_threads
        self._max_restarts = max_restarts
        self._num_restarts: Counter[str] = Counter()
        self._leaving: set[str] = set()
        self._given_up: dict[str, ManagedProcess] = {}
        self._note = note

    @property
    def names(self) -> list[str]:
        """The engines that are here to stay, in the order they were started."""
        return [name for name in self.parts if name not in self._leaving]

    def start(self, name: str) -> None:
        self._folder.forget_announcement(name)
        self._given_up.pop(name, None)
        self.parts[name] = start_process(self._folder, name, ["engine", "--name", name], self._num_threads)

    def stop(self, name: str) -> None:
        """Let an engine finish what it has, and no more."""
        self._folder.admin().drain(name)
        self._leaving.add(name)

    def ended(self) -> list[ManagedProcess]:
        return [part for part in self.parts.values() if part.returncode is not None]

    def start_requested(self) -> None:
        """Start the engines that were asked for with `polyrhythm engines add`."""
        for name in self._folder.take_engine_requests():
            if name not in self.parts:
                self._note(f"{name} is started: it was asked for")
                self.start(name)

    def supervise(self, ended: list[ManagedProcess], status: dict[str, Any]) -> None:
        """Judge engines by a status that is newer than their ends; RunError when there is no engine left."""
        for engine in status["engines"]:
            part = self.parts.get(engine["name"])
            if part is not None and engine["url"] == self._folder.url(part.name):
                self._follow(part, engine)
        for part in ended:
            self._handle_end(part)
        if self._given_up and not self.parts and not self._others(status):
            raise RunError("\n".join(part.describe_end() for part in self._given_up.values()))

    def _follow(self, part: ManagedProcess, engine: dict[str, Any]) -> None:
        """Do with a process what the conductor has decided about its engine."""
        if engine["state"] == "draining" or engine["dismissed"]:
            self._leaving.add(part.name)
        if engine["state"] == "gone" and engine["dismissed"]:
            part.ask_to_end()
        elif engine["state"] == "gone" and part.returncode is None:
            self._note(f"{part.name} is given up ({engine['cause']}): its process is killed")
            part.kill()

    def _handle_end(self, part: ManagedProcess) -> None:
        if part.name in self._leaving:
            self._leaving.discard(part.name)
            self._note(f"{part.name} has left the run")
            del self.parts[part.name]
        elif self._max_restarts == 0:
            raise RunError(part.describe_end())
        elif self._num_restarts[part.name] < self._max_restarts:
            self._num_restarts[part.name] += 1
            number = f"{self._num_restarts[part.name]} of {self._max_restarts}"
            self._note(f"{part.describe_end()}: it is started again, {number}")
            self.start(part.name)
        else:
            self._given_up[part.name] = self.parts.pop(part.name)
            self._note(f"{part.describe_end()}: cluster.max_restarts={self._max_restarts} are used up, it stays away")

    def _others(self, status: dict[str, Any]) -> list[str]:
        """Engines of the run that were started elsewhere."""
        present = [engine["name"] for engine in status["engines"] if engine["state"] != "gone"]
        return [name for name in present if name not in self._given_up]
