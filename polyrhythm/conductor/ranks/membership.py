"""Who the ranks of the trainer are: each joins under its name, and when all are there the run's one epoch begins."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polyrhythm.conductor.change import Change
from polyrhythm.conductor.ranks.rendezvous import Rendezvous
from polyrhythm.conductor.refusals import Conflict
from polyrhythm.messages import Membership, RankJoin

SILENCE_S = 5.0
"""Who waits for the others asks again and again: who has not asked for so long is gone, and another may take its place."""
TICK_S = 1.0

log = logging.getLogger(__name__)


@dataclass
class Place:
    """One rank of the run and the process that has taken it."""

    member: str
    seen_s: float


class FixedMembership:
    """A fixed number of ranks: the epoch begins when every name is taken, and nobody joins or is replaced after that."""

    def __init__(
        self,
        names: Sequence[str],
        version: int,
        rendezvous: Rendezvous,
        check: Callable[[], None] = lambda: None,
        event: Callable[[], None] = lambda: None,
    ):
        """Training begins with `version`; `check` raises why nobody should wait any more; `event` hears of changes."""
        self.names = list(names)
        self._version = version
        self._rendezvous = rendezvous
        self._check = check
        self._event = event
        self._places: dict[str, Place] = {}
        self._changed = Change()

    @property
    def epoch(self) -> int:
        """0 until all are there."""
        return self._rendezvous.epoch

    @property
    def missing(self) -> list[str]:
        """For whom those wait who have joined."""
        return [name for name in self.names if name not in self._places] if self._places else []

    async def join(self, request: RankJoin, wait_s: float) -> Membership:
        """Take a place, once or again, and wait for the others. Epoch 0 after `wait_s`: ask again."""
        self._take(request)
        until_s = time.monotonic() + wait_s
        while True:
            self._check()
            self._see(request)
            remaining_s = until_s - time.monotonic()
            if self.epoch or remaining_s <= 0:
                return Membership(self.epoch, self.names if self.epoch else list(self._places), self._version)
            await self._changed.wait(min(remaining_s, TICK_S))

    def _take(self, request: RankJoin) -> None:
        if request.name not in self.names:
            raise Conflict(f"there is no rank {request.name!r} in this run: its ranks are {', '.join(self.names)}")
        there = self._places.get(request.name)
        if there is not None and there.member != request.member:
            if self.epoch or time.monotonic() - there.seen_s < SILENCE_S:
                raise Conflict(f"rank {request.name} has joined already: each rank of a run is one process")
            log.warning("%s waited for the others and is gone: another process takes its place", request.name)
        if there is None or there.member != request.member:
            log.info("rank %s has joined", request.name)
            self._places[request.name] = Place(request.member, time.monotonic())
            self._event()

    def _see(self, request: RankJoin) -> None:
        """A sign of life; with the last one that was missing, the epoch begins."""
        now_s = time.monotonic()
        self._places[request.name].seen_s = now_s
        waiting = [place for place in self._places.values() if now_s - place.seen_s < SILENCE_S]
        if not self.epoch and len(waiting) == len(self.names):
            log.info("all %d ranks have joined", len(self.names))
            self._rendezvous.begin(1)
            self._changed.set()
