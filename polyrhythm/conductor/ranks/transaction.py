"""One update of elastic ranks as a transaction: all members make it, from one sum over all its groups, or nobody does. Pure.

collecting ─ everybody is ready, every group has exactly one owner ─► reducing ─ all have the same sum ─► committed
     ▲                                                                   │
     └────────────── a member is lost, or its reduction failed ──────────┘
"""

from collections.abc import Callable
from dataclasses import dataclass

from polyrhythm.conductor.ranks.members import Members
from polyrhythm.conductor.refusals import Conflict
from polyrhythm.conductor.steps.assignment import GroupAssignment


@dataclass(frozen=True)
class Attempt:
    """The members of one epoch, in their order, who add up what they hold."""

    epoch: int
    members: list[str]
    without_state: list[str]
    """Those who do not hold what the optimizer remembers: the first of the others sends it to them."""
    said: list[bytes]
    """What each of them has said about its part."""


@dataclass(frozen=True)
class _Part:
    positions: list[int]
    said: bytes


class Update:
    """The update that is made of the first `until` groups of a step, after those of the updates before it."""

    def __init__(self, members: Members, assignment: GroupAssignment, until: int, next_epoch: Callable[[], int]):
        self.until = until
        self.attempt: Attempt | None = None
        self.is_committed = False
        self.num_disagreements = 0
        """Attempts after which the members did not hold the same sum."""
        self.num_failures, self.cause = 0, ""
        """Attempts that a member has given up since one was lost, and why."""
        self._members = members
        self._assignment = assignment
        self._next_epoch = next_epoch
        self._parts: dict[str, _Part] = {}
        self._digests: dict[str, str] = {}

    def ready(self, id: str, positions: list[int], said: bytes) -> None:
        """A member has trained on these groups and there is nothing more for it. What it says must be what it owns."""
        if self.is_committed or (self.attempt and id in self.attempt.members):
            return  # it says so once more
        owned = sorted(self._assignment.owned(id))
        if not set(positions) <= set(owned) or len(set(positions)) < len(positions):
            raise Conflict(f"{id} has trained on positions {positions} and owns {owned}: a group would count twice")
        self._parts[id] = _Part(positions, said)
        self._begin_if_all_are_ready()

    def decision(self, id: str) -> Attempt | bool | None:
        """What a member that has said that it is ready does: the attempt; True: look for more groups; None: wait."""
        if self.attempt is not None and id in self.attempt.members:
            return self.attempt
        part = self._parts.get(id)
        if part is None or self._assignment.num_waiting or len(part.positions) < len(self._assignment.owned(id)):
            self._parts.pop(id, None)
            return True
        self._begin_if_all_are_ready()
        return self.attempt if self.attempt is not None and id in self.attempt.members else None

    def reduced(self, id: str, epoch: int, digest: str) -> None:
        """A member holds the whole sum."""
        if self.is_committed or self.attempt is None or self.attempt.epoch != epoch or id not in self.attempt.members:
            return  # of an epoch that is over
        self._digests[id] = digest
        if len(self._digests) < len(self.attempt.members):
            return
        if len(set(self._digests.values())) > 1:
            self.num_disagreements += 1
            self._abort()
            return
        self.is_committed = True
        self._assignment.settle()
        for member in self._members.entered:
            member.has_state = True

    def verdict(self, epoch: int) -> bool | None:
        """Whether the sum of this epoch is the update; None: not known yet."""
        if self.attempt is None or self.attempt.epoch != epoch:
            return False
        return True if self.is_committed else None

    def failed(self, id: str, epoch: int, cause: str = "") -> None:
        """A member could not add up with the others."""
        if not self.is_committed and self.attempt and self.attempt.epoch == epoch and id in self.attempt.members:
            self.num_failures += 1
            self.cause = cause
            self._abort()

    def lose(self, id: str) -> list[int]:
        """A member is gone; the positions that the others train on again. After the commit there are none."""
        self._parts.pop(id, None)
        self.num_failures = 0
        if self.attempt and id in self.attempt.members and not self.is_committed:
            self._abort()
        return self._assignment.lose(id)

    def _begin_if_all_are_ready(self) -> None:
        entered = self._members.entered
        if self.attempt is not None or not self._assignment.has_dealt_all(self.until):
            return
        if not entered or any(member.id not in self._parts for member in entered):
            return
        if not any(member.has_state for member in entered):
            return  # an update by an optimizer that has forgotten: who holds the state is still to come
        for member in entered:
            if sorted(self._parts[member.id].positions) != sorted(self._assignment.owned(member.id)):
                return  # it was dealt more after it had said so
        without_state = [member.id for member in entered if not member.has_state]
        said = [self._parts[member.id].said for member in entered]
        self.attempt = Attempt(self._next_epoch(), [member.id for member in entered], without_state, said)
        self._digests = {}

    def _abort(self) -> None:
        """Everybody says again what it holds: it may be more by then."""
        self.attempt = None
        self._parts = {}
