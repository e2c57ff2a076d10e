"""The engines of this machine: started, and started again when they die, within a budget."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from polyrhythm.cluster.part import Part, start_part
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.errors import RunError


class Fleet:
    """Engine processes by name. `note` is told, in one line, what was done and why."""

    def __init__(self, folder: RunFolder, num_threads: int, max_restarts: int, note: Callable[[str], None]):
        self.parts: dict[str, Part] = {}
        self._folder = folder
        self._num_threads = num_threads
        self._max_restarts = max_restarts
        self._num_restarts: Counter[str] = Counter()
        self._given_up: dict[str, Part] = {}
        self._note = note

    def start(self, name: str) -> None:
        self._folder.forget_announcement(name)
        self.parts[name] = start_part(self._folder, name, ["engine", "--name", name], self._num_threads)

    def tend(self, status: dict[str, Any]) -> None:
        """Start dead engines again, as long as their budget lasts; RunError when there is no engine left."""
        for part in [part for part in self.parts.values() if part.returncode is not None]:
            self._bury(part)
        if self._given_up and not self.parts and not self._others(status):
            raise RunError("\n".join(part.obituary() for part in self._given_up.values()))

    def _bury(self, part: Part) -> None:
        if self._max_restarts == 0:
            raise RunError(part.obituary())
        if self._num_restarts[part.name] < self._max_restarts:
            self._num_restarts[part.name] += 1
            number = f"{self._num_restarts[part.name]} of {self._max_restarts}"
            self._note(f"{part.obituary()}: it is started again, {number}")
            self.start(part.name)
        else:
            self._given_up[part.name] = self.parts.pop(part.name)
            self._note(f"{part.obituary()}: engine.max_restarts={self._max_restarts} are used up, it stays away")

    def _others(self, status: dict[str, Any]) -> list[str]:
        """Engines of the run that were started elsewhere."""
        present = [engine["name"] for engine in status["engines"] if engine["state"] != "gone"]
        return [name for name in present if name not in self._given_up]
