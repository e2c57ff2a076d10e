"""The order in which a run meets its problems."""

import random
from collections.abc import Collection

import msgspec

from polyrhythm.tasks.mixture import Mixture
from polyrhythm.tasks.task import MixedTask, Task
from polyrhythm.types import Problem

# Endless tasks: each seed begins in a stretch of indices of its own.
INDICES_PER_SEED = 2**32
NUM_STRETCHES = 2**30


class ProblemStream:
    """The problems of a task in the run's order. A cursor, the number of problems taken so far, is all there is to resume.

    A finite task gets a fresh permutation in every epoch, or with `shuffle` off the order of its indices, without those that
    are left out; the parts of a mixed one go through epochs of their own. An endless task is read in the order of its indices.
    """

    def __init__(self, task: Task, seed: int, *, shuffle: bool = True, left_out: Collection[int] = ()) -> None:
        self._task = task
        self._seed = seed
        self._orders: list[EpochOrder] = []
        self._mixture: Mixture | None = None
        if task.num_problems is None:
            return
        parts = task.parts if isinstance(task, MixedTask) else []
        if parts:
            self._mixture = Mixture([part.weight for part in parts], seed)
        for number, indices in enumerate([part.indices for part in parts] or [range(task.num_problems)]):
            kept = [index for index in indices if index not in left_out] if left_out else indices
            self._orders.append(EpochOrder(kept, f"{seed}/{number}" if parts else f"{seed}", shuffle))

    @property
    def num_problems(self) -> int | None:
        """How many different ones there are; None: no end."""
        return sum(order.num_problems for order in self._orders) if self._orders else None

    @property
    def smallest_part(self) -> int:
        """How many problems the smallest part has; with 0 the stream would have to do without it."""
        return min((order.num_problems for order in self._orders), default=1)

    def take(self, cursor: int, n: int) -> list[Problem]:
        """The `n` problems that follow the first `cursor` ones."""
        return [self._problem_at(position) for position in range(cursor, cursor + n)]

    def epochs_after(self, cursor: int) -> float:
        """How often the first `cursor` problems go through the task; of a mixed one, through the part that is gone through most."""
        if self._mixture is None:
            return max((cursor / order.num_problems for order in self._orders), default=0.0)
        taken = self._mixture.taken(cursor)
        return max(num / order.num_problems for num, order in zip(taken, self._orders, strict=True))

    def _problem_at(self, position: int) -> Problem:
        if not self._orders:
            return self._task.problem(self._seed % NUM_STRETCHES * INDICES_PER_SEED + position)
        part, nth = self._mixture.at(position) if self._mixture else (0, position)
        index, epoch = self._orders[part].at(nth)
        return msgspec.structs.replace(self._task.problem(index), epoch=epoch)


class EpochOrder:
    """Some indices, again and again: each epoch in an order that is a function of its number and the seed."""

    def __init__(self, indices: list[int] | range, seed: str, shuffle: bool) -> None:
        self._indices = indices
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._permutation: list[int] | range = range(0)

    @property
    def num_problems(self) -> int:
        return len(self._indices)

    def at(self, position: int) -> tuple[int, int]:
        """The index at this position, and the epoch."""
        epoch, place = divmod(position, len(self._indices))
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, self._permute(epoch)
        return self._indices[self._permutation[place]], epoch

    def _permute(self, epoch: int) -> list[int] | range:
        if not self._shuffle:
            return range(len(self._indices))
        permutation = list(range(len(self._indices)))
        random.Random(f"{self._seed}/{epoch}").shuffle(permutation)
        return permutation
