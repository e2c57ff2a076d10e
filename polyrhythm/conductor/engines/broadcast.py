"""Which engines are sent the next weights, and where they and the sender find each other.

The conductor invites: a sender that has asked to be told, and the engines that hold the version before and can receive.
Everybody else, and everybody whom a broadcast fails, reads the weight store. Each broadcast is a group of its own, so
that nothing is left over from members that have gone.
"""

import logging
import time
from collections.abc import Callable, Iterable

from polyrhythm.conductor.change import Change
from polyrhythm.conductor.engines.health import EngineState
from polyrhythm.conductor.engines.pool import Engine
from polyrhythm.conductor.ranks.rendezvous import Rendezvous
from polyrhythm.messages import Meeting

SHARE_OF_LOAD = 0.5
"""Of the time for a load; the rest is for reading the store instead."""
ASKS_AGAIN_S = 5.0
"""A sender that has stopped asking for so long is gone."""
MAX_MISSES = 3
"""An engine that so many broadcasts in a row have not reached is not invited any more."""

log = logging.getLogger(__name__)


class Broadcasts:
    """One at a time: the next takes the place of the one before."""

    def __init__(self, load_deadline_s: float, check: Callable[[], None] = lambda: None):
        """`check` raises why nobody should wait any more."""
        self.rendezvous = Rendezvous(check)
        self._deadline_s = load_deadline_s * SHARE_OF_LOAD
        self._for_sender: Meeting | None = None
        self._invited: dict[Engine, Meeting] = {}
        self._num_asking = 0
        self._asked_s = -ASKS_AGAIN_S
        self._planned = Change()

    def plan(self, version: int, engines: Iterable[Engine]) -> None:
        """Invite the sender and who can receive `version`, which has just been published. Nobody, if nobody would send it."""
        self._invited, self._for_sender = {}, None
        receivers = [engine for engine in engines if self._can_receive(engine, version)]
        if not receivers or not self._has_sender:
            return
        num_members = 1 + sum(engine.capabilities.num_receivers for engine in receivers)
        number, member = self.rendezvous.epoch + 1, 1
        self.rendezvous.begin(number)
        for engine in receivers:
            self._invited[engine] = Meeting(version, number, member, num_members, self._deadline_s)
            member += engine.capabilities.num_receivers
        self._for_sender = Meeting(version, number, 0, num_members, self._deadline_s)
        self._planned.set()

    def take(self, engine: Engine, version: int) -> Meeting | None:
        """The invitation of an engine that is about to load `version`; only its first load has one."""
        meeting = self._invited.pop(engine, None)
        return meeting if meeting is not None and meeting.version == version else None

    def loaded(self, engine: Engine, has_received: bool) -> None:
        """An engine that was invited has loaded, or failed to."""
        engine.num_missed = 0 if has_received else engine.num_missed + 1
        if engine.num_missed == MAX_MISSES:
            log.warning("%d broadcasts have not reached engine %s: it reads the weight store", MAX_MISSES, engine.name)

    async def next_for_sender(self, after: int, wait_s: float) -> Meeting | None:
        """The meeting of a version above `after`, as soon as there is one; None when `wait_s` have passed."""
        until_s = time.monotonic() + wait_s
        self._num_asking += 1
        try:
            while True:
                meeting, left_s = self._for_sender, until_s - time.monotonic()
                if meeting is not None and meeting.version > after:
                    return meeting
                if left_s <= 0:
                    return None
                await self._planned.wait(left_s)
        finally:
            self._num_asking -= 1
            self._asked_s = time.monotonic()

    @property
    def _has_sender(self) -> bool:
        return self._num_asking > 0 or time.monotonic() - self._asked_s < ASKS_AGAIN_S

    def _can_receive(self, engine: Engine, version: int) -> bool:
        is_newcomer = engine.health.state is not EngineState.READY or engine.health.policy_version != version - 1
        return engine.capabilities.num_receivers > 0 and not is_newcomer and engine.num_missed < MAX_MISSES
