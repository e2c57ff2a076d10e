"""The work of a step that is not at an engine: what goes out next, and what waits before it is tried again. Pure."""

import heapq
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 10.0


@dataclass
class Work:
    """One position of the step until its rollouts are in."""

    position: int
    num_attempts: int = 0
    avoid: str = ""
    """The engine that failed it last: another one is preferred."""
    refused_by: set[str] = field(default_factory=set)
    """Engines that called the request itself wrong: they are not asked again."""
    refused_since_s: float = math.inf
    is_finished: bool = False


def pause_before_attempt(num_attempts: int, jitter: float) -> float:
    """Seconds to wait after `num_attempts` failed attempts: doubled each time, then spread by a half either way."""
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** (num_attempts - 1)) * (0.5 + jitter)


class WorkQueue:
    """Positions go out in the given order; one that failed comes back after a pause, before those that follow it."""

    def __init__(self, positions: Iterable[int], jitter: Callable[[], float] = random.random):
        self._works = {position: Work(position) for position in positions}
        self._rank = {position: rank for rank, position in enumerate(self._works)}
        self._ready = [(rank, position) for position, rank in self._rank.items()]  # sorted, so it is a heap
        self._paused: list[tuple[float, int]] = []
        self._jitter = jitter

    def __len__(self) -> int:
        return len(self._ready) + len(self._paused)

    def work(self, position: int) -> Work:
        return self._works[position]

    def peek(self, now_s: float) -> Work | None:
        """What `pop` would give; None when nothing is ready."""
        while self._paused and self._paused[0][0] <= now_s:
            self._make_ready(heapq.heappop(self._paused)[1])
        return self._works[self._ready[0][1]] if self._ready else None

    def pop(self) -> Work:
        return self._works[heapq.heappop(self._ready)[1]]

    def put_back(self, work: Work, now_s: float) -> None:
        """Try again after a pause that grows with the number of attempts."""
        pause_s = pause_before_attempt(work.num_attempts, self._jitter())
        heapq.heappush(self._paused, (now_s + pause_s, work.position))

    def start_anew(self, work: Work) -> None:
        """The problem of this position was replaced: nothing that happened before counts."""
        work.num_attempts = 0
        work.avoid = ""
        work.refused_by = set()
        work.refused_since_s = math.inf
        self._make_ready(work.position)

    def seconds_to_next(self, now_s: float) -> float:
        """Until the first paused work is ready again; infinite when nothing is paused."""
        return max(0.0, self._paused[0][0] - now_s) if self._paused else math.inf

    def _make_ready(self, position: int) -> None:
        heapq.heappush(self._ready, (self._rank[position], position))
