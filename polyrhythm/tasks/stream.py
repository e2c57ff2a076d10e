"""The order in which a run meets its problems."""

import random

import msgspec

from polyrhythm.tasks.task import Task
from polyrhythm.types import Problem

# Endless tasks: each seed begins in a stretch of indices of its own.
INDICES_PER_SEED = 2**32
NUM_STRETCHES = 2**30


class ProblemStream:
    """The problems of a task in seeded order. A cursor, the number of problems taken so far, is all there is to resume.

    A finite task gets a fresh permutation in every epoch; an endless one is read in the order of its indices.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self._task = task
        self._seed = seed
        self._epoch = -1
        self._permutation: list[int] = []

    def take(self, cursor: int, n: int) -> list[Problem]:
        """The `n` problems that follow the first `cursor` ones."""
        return [self._problem_at(position) for position in range(cursor, cursor + n)]

    def _problem_at(self, position: int) -> Problem:
        num_problems = self._task.num_problems
        if num_problems is None:
            return self._task.problem(self._seed % NUM_STRETCHES * INDICES_PER_SEED + position)
        epoch, place = divmod(position, num_problems)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = list(range(num_problems))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._permutation)
        return msgspec.structs.replace(self._task.problem(self._permutation[place]), epoch=epoch)
