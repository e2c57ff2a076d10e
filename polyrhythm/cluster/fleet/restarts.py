"""How often a process of a run that has died is started again: within a budget, by name."""

from collections import Counter
from collections.abc import Callable

from polyrhythm.cluster.launcher import RunProcess


class Restarts:
    """`note` is told, in one line, what is done and why."""

    def __init__(self, max_restarts: int, note: Callable[[str], None]):
        self.max_restarts = max_restarts
        self._note = note
        self._num: Counter[str] = Counter()

    def allow(self, process: RunProcess) -> bool:
        """Whether a process that has ended may be started again; it counts."""
        if self._num[process.name] >= self.max_restarts:
            return False
        self._num[process.name] += 1
        number = f"{self._num[process.name]} of {self.max_restarts}"
        self._note(f"{process.describe_end()}: it is started again, {number}")
        return True

    def give_up(self, process: RunProcess) -> None:
        self._note(
            f"{process.describe_end()}: cluster.max_restarts={self.max_restarts} are used up, it stays away"
        )  # fmt: skip
