"""Who the ranks of the trainer are: each joins under its name, and when all are there the run's one epoch begins."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polyrhythm.conductor.change import Change
from polyrhythm.conductor.ranks.rendezvous import Rendezvous
from polyrhythm.conductor.refusals import Conflict, Dismissed
from polyrhythm.config import Config
from polyrhythm.messages import Membership, RankBeat, RankJoin

SILENCE_S = 5.0
"""Who waits for the others asks again and again: who has not asked for so long is gone, and another may take its place."""
TICK_S = 1.0
NEWS_TICK_S = 0.25
"""Shorter than a conductor that has failed goes on to answer."""
WITHOUT_FOLDER = (
    "{name} writes weights, checkpoints and the trained model: it needs the run's folder and weight store "
    "on its machine, at the paths that they have at the conductor (a shared output_dir and weights.root)"
)

log = logging.getLogger(__name__)


@dataclass
class Place:
    """One rank of the run and the process that has taken it."""

    member: str
    seen_s: float
    is_beating: bool = False
    """It gives signs of life from its first one on until it leaves; before, it starts, and the run's stall deadline judges."""


class FixedMembership:
    """A fixed number of ranks: the epoch begins when every name is taken, and nobody joins or is replaced after that."""

    def __init__(
        self,
        names: Sequence[str],
        version: int,
        rendezvous: Rendezvous,
        check: Callable[[], None] = lambda: None,
        event: Callable[[], None] = lambda: None,
        num_here: int = 0,
        lease_s: float = 60.0,
        all_write: bool = False,
    ):
        """Training begins with `version`. `check` raises why nobody should wait any more; `event` hears of changes.

        The first `num_here` are started by the run itself, each under its name. All of them write weights if each holds only
        its part, else the first does.
        """
        self.names = list(names)
        self._num_here = num_here
        self._lease_s = lease_s
        self._writers = self.names if all_write else self.names[:1]
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
        name = request.name or self._free_name(request)
        self._take(name, request)
        until_s = time.monotonic() + wait_s
        while True:
            self._check()
            self._see(name)
            remaining_s = until_s - time.monotonic()
            if self.epoch or remaining_s <= 0:
                members = self.names if self.epoch else list(self._places)
                return Membership(self.epoch, members, self._version, name, self._lease_s)
            await self._changed.wait(min(remaining_s, TICK_S))

    async def heartbeat(self, beat: RankBeat, wait_s: float) -> None:
        """A sign of life. The answer comes when `wait_s` have passed, or at once if the run has failed: the rank may be waiting
        for another, and hears of it in no other way."""
        place = self._places.get(beat.name)
        if place is None or place.member != beat.member:
            raise Dismissed(f"rank {beat.name} is another process")
        now_s = place.seen_s = time.monotonic()
        place.is_beating = not beat.is_leaving
        self._check()
        while (remaining_s := now_s + wait_s - time.monotonic()) > 0:
            await self._changed.wait(min(remaining_s, NEWS_TICK_S))
            self._check()

    def why_lost(self, is_over: bool) -> str | None:
        """Why the run cannot go on: one of those who have begun together gives no sign of life.

        When all steps are done, the first one still has the trained model to save.
        """
        now_s = time.monotonic()
        for name, place in self._places.items():
            silent_s = now_s - place.seen_s
            is_needed = place.is_beating and (not is_over or name == self.names[0])
            if is_needed and silent_s > self._lease_s:
                return f"rank {name} gave no sign of life for {silent_s:.0f} s (conductor.lease_s={self._lease_s:g})"
        return None

    def _free_name(self, request: RankJoin) -> str:
        for name, place in self._places.items():
            if place.member == request.member:
                return name
        free = [name for name in self.names[self._num_here :] if not self._is_taken(name)]
        fitting = [name for name in free if request.has_run_folder or name not in self._writers]
        if free and not fitting:
            raise Conflict(WITHOUT_FOLDER.format(name=free[0]))
        if not free:
            raise Conflict(
                f"no rank is free: the run itself starts {self._num_here} of training.num_ranks={len(self.names)}, "
                "and all that join from elsewhere (training.ranks_elsewhere) are there"
            )
        return fitting[0]

    def _take(self, name: str, request: RankJoin) -> None:
        if name not in self.names:
            raise Conflict(f"there is no rank {name!r} in this run: its ranks are {', '.join(self.names)}")
        if name in self._writers and not request.has_run_folder:
            raise Conflict(WITHOUT_FOLDER.format(name=name))
        there = self._places.get(name)
        if there is not None and there.member == request.member:
            return
        if self._is_taken(name):
            raise Conflict(f"rank {name} has joined already: each rank of a run is one process")
        if there is not None:
            log.warning("%s waited for the others and is gone: another process takes its place", name)
        log.info("rank %s has joined", name)
        self._places[name] = Place(request.member, time.monotonic())
        self._event()

    def _is_taken(self, name: str) -> bool:
        place = self._places.get(name)
        return place is not None and (self.epoch > 0 or time.monotonic() - place.seen_s < SILENCE_S)

    def _see(self, name: str) -> None:
        """A sign of life; with the last one that was missing, the epoch begins."""
        now_s = time.monotonic()
        self._places[name].seen_s = now_s
        waiting = [place for place in self._places.values() if now_s - place.seen_s < SILENCE_S]
        if not self.epoch and len(waiting) == len(self.names):
            log.info("all %d ranks have joined", len(self.names))
            self._rendezvous.begin(1)
            self._changed.set()


def membership_of(
    config: Config, version: int, rendezvous: Rendezvous, check: Callable[[], None], event: Callable[[], None]
) -> FixedMembership:
    """Of a run that begins with `version`."""
    training = config.training
    return FixedMembership(
        training.rank_names, version, rendezvous, check, event, training.num_ranks_here, config.conductor.lease_s,
        all_write=training.is_sharded,
    )  # fmt: skip
