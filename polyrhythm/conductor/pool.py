"""The engine pool: who is there, in which state, and who gets the next group."""

import time
from collections import deque
from dataclasses import dataclass, field

from polyrhythm.conductor.change import Change
from polyrhythm.conductor.engine_client import EngineClient
from polyrhythm.conductor.engine_state import EngineHealth, EngineState
from polyrhythm.wire import EngineStatus, Span

MAX_SPANS = 2000


@dataclass(eq=False)
class Engine:
    """One engine: how to reach it, what is known of it, what it is working on."""

    name: str
    url: str
    client: EngineClient
    health: EngineHealth
    num_groups_in_flight: int = 0
    status: EngineStatus | None = None
    tokens_per_s: float = 0.0
    probed_at_s: float = 0.0
    doing: str = ""
    doing_since_s: float = 0.0

    def saw(self, status: EngineStatus, now_s: float) -> None:
        """Keep what the engine says of itself, and its rate since the last time."""
        elapsed_s = now_s - self.probed_at_s
        if self.status is not None and elapsed_s > 0:
            tokens = status.num_tokens_generated - self.status.num_tokens_generated
            self.tokens_per_s = max(0.0, tokens / elapsed_s)
        self.status, self.probed_at_s = status, now_s


@dataclass
class EnginePool:
    """Engines in the order they joined. `groups_per_engine` limits what is in flight at each."""

    groups_per_engine: int
    changed: Change = field(default_factory=Change)
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    _engines: dict[str, Engine] = field(default_factory=dict)

    @property
    def engines(self) -> list[Engine]:
        return list(self._engines.values())

    def get(self, name: str) -> Engine | None:
        return self._engines.get(name)

    def add(self, engine: Engine) -> None:
        """An engine of the same name is replaced: it was restarted."""
        self._engines[engine.name] = engine
        self.changed.set()

    @property
    def present(self) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.health.state is not EngineState.GONE]

    def least_loaded(self, version: int, now_s: float) -> Engine | None:
        """The engine that may serve `version` and has the most room; None when none has any."""
        best = None
        for engine in self._engines.values():
            in_flight = engine.num_groups_in_flight
            has_room = in_flight < self.groups_per_engine and (best is None or in_flight < best.num_groups_in_flight)
            if has_room and engine.health.can_serve(version, now_s, in_flight):
                best = engine
        return best

    def take(self, engine: Engine) -> None:
        """A group goes to this engine."""
        engine.num_groups_in_flight += 1
        if engine.num_groups_in_flight == 1:
            self.begin(engine, "generate")

    def release(self, engine: Engine) -> None:
        """A group came back from this engine, in whatever shape."""
        engine.num_groups_in_flight -= 1
        if engine.num_groups_in_flight == 0:
            self.end(engine)
        self.changed.set()

    def begin(self, engine: Engine, what: str) -> None:
        engine.doing, engine.doing_since_s = what, time.time()

    def end(self, engine: Engine) -> None:
        if engine.doing:
            self.spans.append(Span(engine.name, engine.doing, engine.doing_since_s, time.time()))
        engine.doing = ""
