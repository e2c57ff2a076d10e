"""Elastic ranks at the conductor: they join, take part in updates, are lost or leave while the run goes on.

    join ─► load the weights of the open step ─► enter ─► groups ─► ready ─► add up ─► commit ─► groups …

What a lost rank had trained on since the last update is dealt again to the others. One of them, the first by name, speaks
for all: it publishes and saves, and when it is lost the next one does.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from polyrhythm.conductor.change import Change
from polyrhythm.conductor.ranks.members import Member, Members
from polyrhythm.conductor.ranks.rendezvous import Rendezvous
from polyrhythm.conductor.ranks.transaction import Attempt, Update
from polyrhythm.conductor.refusals import Conflict, Dismissed
from polyrhythm.conductor.steps.step import Step
from polyrhythm.config import Config
from polyrhythm.messages import (
    Membership,
    RankBeat,
    RankDecision,
    RankDuty,
    RankDutyReply,
    RankEnter,
    RankEntry,
    RankFailed,
    RankJoin,
    RankNews,
    RankReady,
    RankReduced,
    RankStay,
    RankVerdict,
    publish_duty,
)

T = TypeVar("T")
TICK_S = 1.0
MIN_PATIENCE_S = 10.0
MAX_FAILURES = 20
"""Of one update, without a rank that is lost."""
MAX_DISAGREEMENTS = 3
"""Sums of the same numbers in the same order are the same bits: ranks that disagree again and again compute wrongly."""

log = logging.getLogger(__name__)


class ElasticRanks:
    """Who the ranks are, and the update that they are making. All methods that wait end when the run has failed."""

    def __init__(
        self,
        config: Config,
        first_step: int,
        rendezvous: Rendezvous,
        check: Callable[[], None],
        event: Callable[[], None],
        fail: Callable[[str], None],
        forget: Callable[[str], None],
    ):
        """`check` raises why nobody should wait any more, `event` hears of changes, `fail` ends the run, `forget` hears who is gone."""
        self.members = Members(config.conductor.lease_s)
        self.update: Update | None = None
        self.num_lost = 0
        """Ranks that were lost in the open step."""
        self.lost_at: dict[str, float] = {}
        """When the ranks were given up that nobody wanted to leave; seconds since the epoch."""
        self._config = config
        self._first_step = first_step
        self._rendezvous = rendezvous
        self._check = check
        self._event = event
        self._fail = fail
        self._forget = forget
        self._changed = Change()
        self._step: Step | None = None
        self._num_updates = 0
        self._has_updated = False
        self._ended_epoch = 0
        self._committed_epoch = 0
        self._done: set[str] = set()
        self._gone: dict[str, Conflict | Dismissed] = {}
        self._founders: set[str] | None = None
        self._made_s = time.monotonic()
        self._joined_s: float | None = None

    @property
    def epoch(self) -> int:
        return self._rendezvous.epoch

    @property
    def missing(self) -> list[str]:
        """For whom those wait who have joined."""
        present = {member.name for member in self.members.present}
        names = self._config.training.rank_names
        return [name for name in names if name not in present] if present and self._founders is None else []

    def may_deal_to(self, id: str) -> bool:
        """Whoever was there when the run began takes part from the first group on. Refused if it is not a member."""
        self._member(id)
        return all(member.has_entered for member in self.members.present if member.id in (self._founders or ()))

    @property
    def is_trained(self) -> bool:
        """Whether all updates of the open step are made."""
        return self._num_updates == self._config.training.updates_per_step

    def check(self, id: str) -> Member:
        """A sign of life of a member; refused if it is none."""
        member = self._member(id)
        member.seen_s = time.monotonic()
        return member

    async def join(self, request: RankJoin, wait_s: float) -> Membership:
        """Be known to the run. `wait_s` is not needed: nobody waits for others to join."""
        self._check()
        if request.member in self._gone or self._is_over:
            raise self._gone.get(request.member) or Dismissed("the run is over")
        member = self.members.get(request.member)
        if member is None:
            name = request.name or self._free_name()
            if there := self.members.named(name):
                self.lose(there.id, "another process has its name now")
            member = self.members.add(request.member, name, time.monotonic(), can_write=request.has_run_folder)
            self.lost_at.pop(name, None)  # that was the process before this one
            self._joined_s = self._joined_s or time.monotonic()
            log.info("rank %s has joined", name)
            self._has_changed()
        version = self._step.version if self._step else self._first_step
        return Membership(
            self.epoch, [member.name for member in self.members.present], version, member.name, self.members.lease_s
        )

    async def enter(self, request: RankEnter, wait_s: float) -> RankEntry:
        """Take part in updates, as soon as the rank holds what is being trained."""
        self.check(request.member)
        return await self._until(lambda: self._entry(request), request.member, wait_s) or RankEntry("wait")

    async def stay(self, request: RankStay, wait_s: float) -> RankNews:
        was_first = self._is_first(self.check(request.member))

        def news() -> RankNews | None:
            is_first = self._is_first(self._member(request.member))
            has_news = self._ended_epoch > request.ended_epoch or is_first != was_first
            return RankNews(self._ended_epoch, is_first) if has_news else None

        return await self._until(news, request.member, wait_s) or RankNews(self._ended_epoch, was_first)

    async def ready(self, request: RankReady, wait_s: float) -> RankDecision:
        if not self.check(request.member).has_entered or self.update is None:
            raise Conflict(f"{request.member} takes no part in an update: enter first")
        update = self.update
        update.ready(request.member, request.positions, request.said)
        self._changed.set()

        def decision() -> RankDecision | None:
            decided = update.decision(request.member)
            if isinstance(decided, Attempt):
                return RankDecision("go", decided.epoch, decided.members, decided.without_state, decided.said)
            return RankDecision("more") if decided else None

        return await self._until(decision, request.member, wait_s) or RankDecision("wait")

    async def reduced(self, request: RankReduced, wait_s: float) -> RankVerdict:
        self.check(request.member)
        if self.update is not None:
            self.update.reduced(request.member, request.epoch, request.digest)
            self._follow_update()

        def verdict() -> RankVerdict | None:
            if request.epoch == self._committed_epoch:
                return RankVerdict("commit")
            attempt = self.update.attempt if self.update else None
            return None if attempt and attempt.epoch == request.epoch else RankVerdict("again")

        return await self._until(verdict, request.member, wait_s) or RankVerdict("wait")

    def failed(self, request: RankFailed) -> None:
        name = self.check(request.member).name
        if self.update is not None:
            log.warning("%s could not add up in epoch %d: %s", name, request.epoch, request.cause)
            self.update.failed(request.member, request.epoch, request.cause)
            self._follow_update()

    async def duty(self, request: RankDuty, wait_s: float) -> RankDutyReply:
        """Whose it is to do something for all: the first member's, until it is done."""
        self.check(request.member)
        if request.is_done:
            self._is_done(request.duty)

        def reply() -> RankDutyReply | None:
            if request.duty in self._done:
                return RankDutyReply("done")
            return RankDutyReply("yours") if self._is_first(self._member(request.member)) else None

        return await self._until(reply, request.member, wait_s) or RankDutyReply("wait")

    def begin_step(self, step: Step) -> None:
        """Its weights are published: who takes part goes on with it."""
        self._is_done(publish_duty(step.version))
        self._dismiss_leaving()
        self._step, self._num_updates = step, 0
        for member in self.members.entered:
            step.assignment.add(member.id)
        self._begin_update()

    def check_trained(self, step: Step) -> None:
        if not self.is_trained:
            raise Conflict(f"the ranks have not committed the last update of step {step.number}")

    def close_step(self, step: Step) -> dict[str, float]:
        """The weights that it made are published; what was seen of the ranks meanwhile."""
        self._is_done(publish_duty(step.version + 1))
        seen: dict[str, float] = {"ranks/lost": self.num_lost, "ranks/groups_again": step.assignment.num_returned}
        self.num_lost = 0
        return seen

    def drain(self, name: str) -> None:
        """It leaves after the update that is being made or, if it is the one that publishes it, after that."""
        member = self._named(name)
        member.is_leaving = True
        if not member.has_entered or (self.is_trained and not self._is_first(member)):
            self._dismiss(member, "drained")
        self._has_changed()

    def remove(self, name: str) -> None:
        """It leaves at once; the others train on what it had. Who publishes does that first: two must not write one version."""
        member = self._named(name)
        if self.is_trained and self._is_first(member):
            self.drain(name)
        else:
            self._dismiss(member, "removed")

    def ended(self, name: str) -> None:
        """Its process has ended, as whoever started it has seen."""
        if member := self.members.named(name):
            self.lose(member.id, "its process has ended")

    def why_lost(self, is_over: bool) -> str | None:
        """Lets go of whoever gave no sign of life for too long; that ends no run."""
        for member in self.members.silent(time.monotonic()):
            self.lose(member.id, f"it gave no sign of life for {self.members.lease_s:g} s")
        return None

    async def heartbeat(self, beat: RankBeat, wait_s: float) -> None:
        """Elastic ranks say so by `stay`."""
        self.check(beat.member)

    def lose(self, id: str, why: str) -> None:
        """A rank is gone: what it had trained on since the last update goes to the others."""
        member = self.members.get(id)
        if member is None:
            return
        self._gone.setdefault(id, Conflict(f"rank {member.name} was given up: {why}"))
        self.lost_at[member.name] = time.time()
        self._let_go(member, why)

    def _dismiss(self, member: Member, why: str) -> None:
        self._gone[member.id] = Dismissed(f"rank {member.name} was {why}")
        self._let_go(member, why)

    def _dismiss_leaving(self) -> None:
        for member in self.members.present:
            if member.is_leaving:
                self._dismiss(member, "drained")

    def _let_go(self, member: Member, why: str) -> None:
        again = self.update.lose(member.id) if self.update and not self._is_over else []
        self.members.remove(member.id)
        self._forget(member.name)
        if not self._is_over:
            self.num_lost += not member.is_leaving
            log.warning("rank %s is gone (%s): positions %s are dealt again", member.name, why, again)
        self._follow_update()
        if (
            self._has_updated
            and not self._is_over
            and not any(m.has_state and m.can_write for m in self.members.present)
        ):
            self._fail(
                "no rank is left that holds the state of the optimizer and has the run's folder: go on from the last checkpoint"
            )

    def _entry(self, request: RankEnter) -> RankEntry | None:
        member = self._member(request.member)
        if member.has_entered:
            assert self._step is not None
            return RankEntry("train", self._step.version)
        if self._step is None:
            return self._found(member)
        if self._is_over:
            raise Dismissed("the run is over")
        if self._num_updates or self.update is None or self.update.attempt:
            return None  # weights that are in no store: the next step
        if request.holds != self._step.version:
            return RankEntry("load", self._step.version)
        member.has_entered, member.has_state = True, request.has_state
        self._step.assignment.add(member.id)
        self._has_changed()
        return RankEntry("train", self._step.version)

    def _found(self, member: Member) -> RankEntry | None:
        """Once all are there, or none has come for long enough, the first by name publishes the first version."""
        if self._founders is None:
            now_s = time.monotonic()
            took_s = (self._joined_s or now_s) - self._made_s
            are_all_there = len(self.members.present) >= self._config.training.num_ranks
            if not are_all_there and now_s - self._made_s < took_s + max(took_s, MIN_PATIENCE_S):
                return None
            self._founders = {member.id for member in self.members.present}
        return RankEntry("found", self._first_step) if self._is_first(member) else None

    def _begin_update(self) -> None:
        assert self._step is not None
        until = (self._num_updates + 1) * self._step.num_groups // self._config.training.updates_per_step
        self.update = Update(self.members, self._step.assignment, until, self._begin_epoch)
        self._has_changed()

    def _begin_epoch(self) -> int:
        self._rendezvous.begin(self.epoch + 1)
        return self.epoch

    def _follow_update(self) -> None:
        """The update may have been committed, or its epoch may have ended."""
        update = self.update
        if update is None:
            return
        if update.is_committed and update.attempt and update.attempt.epoch != self._committed_epoch:
            self._committed_epoch = update.attempt.epoch
            self._has_updated = True
            self._num_updates += 1
            if not self.is_trained:
                self._begin_update()
            self._dismiss_leaving()
        elif update.attempt is None and self.epoch > self._ended_epoch and self.epoch != self._committed_epoch:
            self._rendezvous.begin(self.epoch + 1)  # who still waits for another of the epoch is told that it is over
            self._ended_epoch = self.epoch
        if update.num_failures >= MAX_FAILURES:
            self._fail(f"the ranks could not add up {MAX_FAILURES} times in a row: {update.cause}")
        if update.num_disagreements >= MAX_DISAGREEMENTS:
            self._fail(f"the ranks added up the same numbers {MAX_DISAGREEMENTS} times and got different sums")
        self._has_changed()

    def _is_done(self, duty: str) -> None:
        self._done.add(duty)
        self._has_changed()

    @property
    def _is_over(self) -> bool:
        return self._step is not None and publish_duty(self._config.num_steps) in self._done

    def _is_first(self, member: Member) -> bool:
        """Of those who could save what is finished. Before the first version is published it is who founds the run."""
        members = [m for m in self.members.entered if m.has_state] if self._step else self.members.present
        return member is next((member for member in members if member.can_write), None)

    def _free_name(self) -> str:
        """Of a rank from elsewhere: none that the run itself may start again."""
        training = self._config.training
        names = (training.rank_name(rank) for rank in itertools.count(training.num_ranks_here))
        return next(name for name in names if self.members.named(name) is None)

    def _named(self, name: str) -> Member:
        member = self.members.named(name)
        if member is None:
            names = ", ".join(member.name for member in self.members.present)
            raise Conflict(f"there is no rank {name!r}: there are {names or 'none'}")
        return member

    def _has_changed(self) -> None:
        self._event()
        self._changed.set()
        if self._step is not None:
            self._step.changed.set()

    def _member(self, id: str) -> Member:
        self._check()
        member = self.members.get(id)
        if member is None:
            raise self._gone.get(id) or Conflict(f"{id!r} is not one of the ranks: join first")
        return member

    async def _until(self, answer: Callable[[], T | None], id: str, wait_s: float) -> T | None:
        """The answer as soon as there is one; None when `wait_s` have passed. Whoever hangs up while it waits is lost."""
        until_s = time.monotonic() + wait_s
        try:
            while True:
                self._member(id)
                found = answer()
                remaining_s = until_s - time.monotonic()
                if found is not None or remaining_s <= 0:
                    return found
                await self._changed.wait(min(remaining_s, TICK_S))
        except asyncio.CancelledError:
            self.lose(id, "its connection was closed")
            raise
