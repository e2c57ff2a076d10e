"""The engine pool: who is there, in which state, who gets the next group, and what each has in request."""

import asyncio
import time
from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field

from polyrhythm.conductor.change import Change
from polyrhythm.conductor.engines.client import EngineClient
from polyrhythm.conductor.engines.health import EngineHealth, EngineState
from polyrhythm.messages import Capabilities, EngineStatus
from polyrhythm.observe.activity import Activity, Span

MAX_SPANS = 2000
MAX_GONE = 64


@dataclass(eq=False)
class EngineRequest:
    """One request at one engine. `abandon` ends the wait for its answer at once."""

    position: int
    engine: "Engine"
    started_s: float
    scope: asyncio.Timeout | None = None
    """Set while the answer is waited for."""
    is_abandoned: bool = False

    def abandon(self) -> None:
        if self.scope is not None and not self.is_abandoned and not self.scope.expired():
            self.scope.reschedule(asyncio.get_running_loop().time())
        self.is_abandoned = True


@dataclass(eq=False)
class Engine:
    """One engine: how to reach it, what is known of it, what it is working on."""

    name: str
    url: str
    client: EngineClient
    health: EngineHealth
    capabilities: Capabilities
    max_groups: int
    """So many groups may be in flight there."""
    load: float = 0.0
    """The share of them that is."""
    requests: set[EngineRequest] = field(default_factory=set)
    wake: Change = field(default_factory=Change)
    status: EngineStatus | None = None
    tokens_per_s: float = 0.0
    probed_at_s: float = 0.0
    progress_at_s: float = 0.0
    """When it was last seen to have generated something, or had nothing to do."""
    is_lost: bool = False
    is_dismissed: bool = False
    """It was drained or removed, and shall not come back."""
    num_missed: int = 0
    """Broadcasts in a row to which it was invited and that did not reach it."""
    doing: Activity | None = None
    doing_since_s: float = 0.0

    @property
    def num_in_flight(self) -> int:
        return len(self.requests)

    def observe(self, status: EngineStatus, now_s: float) -> None:
        """Keep what the engine says of itself, and its rate since the last time."""
        elapsed_s = now_s - self.probed_at_s
        num_tokens = status.num_tokens_generated - (self.status.num_tokens_generated if self.status else 0)
        if self.status is not None and elapsed_s > 0:
            self.tokens_per_s = max(0.0, num_tokens / elapsed_s)
        if num_tokens != 0 or not self.requests:
            self.progress_at_s = now_s
        self.status, self.probed_at_s = status, now_s


@dataclass
class EnginePool:
    """Engines in the order they joined."""

    changed: Change = field(default_factory=Change)
    num_lost: int = 0
    """How many engines were lost since the last step was committed."""
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    _engines: dict[str, Engine] = field(default_factory=dict)

    @property
    def engines(self) -> list[Engine]:
        return list(self._engines.values())

    @property
    def present(self) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.health.state is not EngineState.GONE]

    def get(self, name: str) -> Engine | None:
        return self._engines.get(name)

    def add(self, engine: Engine) -> None:
        """An engine of the same name takes the place of the old one, which was restarted."""
        if (old := self._engines.get(engine.name)) is not None:
            if not old.health.is_leaving:
                self.lose(old)  # a quick restart may come before anybody has noticed the death
            self.dismiss(old, "an engine of the same name has joined")
        self._engines[engine.name] = engine
        gone = [name for name, known in self._engines.items() if known.health.state is EngineState.GONE]
        for name in gone[:-MAX_GONE]:
            del self._engines[name]
        self.changed.set()

    def dismiss(self, engine: Engine, cause: str, for_good: bool = False) -> None:
        engine.is_dismissed = for_good
        engine.health.leave(cause, time.monotonic())
        self._abandon_requests(engine)

    def give_up(self, engine: Engine) -> None:
        """The engine is quarantined: what it was working on goes elsewhere."""
        self.lose(engine)
        self._abandon_requests(engine)

    def lose(self, engine: Engine) -> None:
        """Count an engine that is not trusted any more, once until it has loaded well again."""
        self.num_lost += not engine.is_lost
        engine.is_lost = True

    def _abandon_requests(self, engine: Engine) -> None:
        for request in engine.requests:
            request.abandon()
        engine.wake.set()
        self.changed.set()

    def num_serving(self, version: int) -> int:
        return len(self.names_serving(version))

    def num_received(self, version: int) -> int:
        """How many of them were sent the version by a broadcast."""
        statuses = (self._engines[name].status for name in self.names_serving(version))
        return sum(status is not None and status.has_received for status in statuses)

    def names_serving(self, version: int) -> set[str]:
        """The engines that hold `version` and are trusted, busy or not."""
        trusted = (EngineState.READY, EngineState.SUSPECT)
        engines = self._engines.values()
        return {e.name for e in engines if e.health.policy_version == version and e.health.state in trusted}

    def least_loaded(self, version: int, now_s: float, avoid: str = "", never: Set[str] = frozenset()) -> Engine | None:
        """The engine that may serve `version` and has the most room, `avoid` only if there is no other, `never` not at all."""
        best, best_load = None, 1.0
        for engine in self._engines.values():
            # For every group of a step over all engines: what rules most of them out is asked first, without a call.
            if engine.load >= best_load or engine.name == avoid or engine.name in never:
                continue
            if engine.health.can_serve(version, now_s, len(engine.requests)):
                best, best_load = engine, engine.load
                if best_load == 0:
                    break
        if best is None and avoid in self._engines and avoid not in never:
            engine = self._engines[avoid]
            has_room = engine.num_in_flight < engine.max_groups
            if has_room and engine.health.can_serve(version, now_s, engine.num_in_flight):
                return engine
        return best

    def begin_request(self, position: int, engine: Engine) -> EngineRequest:
        """A request for a position goes to an engine, which is that much busier from now on."""
        request = EngineRequest(position, engine, time.monotonic())
        if not engine.requests:
            self.begin(engine, Activity.GENERATE)
            engine.progress_at_s = request.started_s
        engine.requests.add(request)
        engine.load = len(engine.requests) / engine.max_groups
        return request

    def end_request(self, request: EngineRequest) -> None:
        """The request is over, in whatever way."""
        request.scope = None
        engine = request.engine
        engine.requests.discard(request)
        engine.load = len(engine.requests) / engine.max_groups
        if not engine.requests:
            self.end(engine)
            engine.wake.set()
        self.changed.set()

    def begin(self, engine: Engine, activity: Activity) -> None:
        engine.doing, engine.doing_since_s = activity, time.time()

    def end(self, engine: Engine) -> None:
        if engine.doing:
            self.spans.append(Span(engine.name, engine.doing, engine.doing_since_s, time.time()))
        engine.doing = None
