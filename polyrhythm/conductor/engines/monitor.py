"""The monitor of the engines: probes each, makes it load the version that is wanted, and lets it go."""

import logging
import time
from collections.abc import Callable

from polyrhythm.conductor.engines.broadcast import Broadcasts
from polyrhythm.conductor.engines.client import EngineError
from polyrhythm.conductor.engines.health import EngineState
from polyrhythm.conductor.engines.pool import Engine, EnginePool
from polyrhythm.observe.activity import Activity

PROBE_INTERVAL_S = 1.0
PROBE_DEADLINE_S = 5.0
MAX_PROBES_PER_S = 100
LOAD_TICK_S = 0.25

log = logging.getLogger(__name__)


class EngineMonitor:
    """Runs one `watch` per engine. `aim` says which version all of them should hold."""

    def __init__(
        self,
        pool: EnginePool,
        broadcasts: Broadcasts,
        load_deadline_s: float,
        stuck_s: float,
        on_event: Callable[[], None],
    ):
        self._pool = pool
        self._broadcasts = broadcasts
        self._load_deadline_s = load_deadline_s
        self._stuck_s = stuck_s
        self._on_event = on_event
        self._target: int | None = None

    def aim(self, version: int) -> None:
        self._target = version
        for engine in self._pool.present:
            engine.wake.set()

    def is_undecided(self, engine: Engine) -> bool:
        """Whether the engine may still come to hold the target without having failed first."""
        state, version = engine.health.state, engine.health.policy_version
        if state in (EngineState.READY, EngineState.SUSPECT):
            return version != self._target
        return state in (EngineState.JOINING, EngineState.LOADING)

    async def watch(self, engine: Engine) -> None:
        """Produces the engine's state until it is gone; waits for the next probe, unblocked by `engine.wake`."""
        health, probe_at_s = engine.health, 0.0
        while health.state is not EngineState.GONE:
            now_s = time.monotonic()
            if health.lease_has_expired(now_s):
                self._pool.lose(engine)
                self._pool.dismiss(engine, f"no sign of life for {now_s - health.last_alive_s:.0f} s: {health.cause}")
            elif health.state is EngineState.DRAINING and not engine.requests:
                self._pool.dismiss(engine, "drained", for_good=True)
            elif self._target is not None and health.wants_load(self._target, now_s):
                await self._load(engine, self._target)
            elif now_s >= probe_at_s:
                probe_at_s = now_s + max(PROBE_INTERVAL_S, len(self._pool.present) / MAX_PROBES_PER_S)
                await self._probe(engine)
            else:
                waits_for_load = health.state is EngineState.QUARANTINED
                await engine.wake.wait(min(LOAD_TICK_S, probe_at_s - now_s) if waits_for_load else probe_at_s - now_s)
        self._on_event()
        log.info("engine %s is gone: %s", engine.name, health.cause)

    async def _load(self, engine: Engine, version: int) -> None:
        """Make an engine load a version, and believe it only when it says that it holds it."""
        engine.health.load_started(time.monotonic())
        self._pool.begin(engine, Activity.LOAD)
        meeting, has_received = self._broadcasts.take(engine, version), False
        try:
            await engine.client.load(version, self._load_deadline_s, meeting)
            status = await engine.client.status(PROBE_DEADLINE_S)
            if status.policy_version != version:
                raise EngineError(f"it holds version {status.policy_version} after loading {version}")
        except EngineError as error:
            log.warning("engine %s did not load version %d: %s", engine.name, version, error)
            engine.health.load_failed(f"did not load version {version}: {error}", time.monotonic())
            self._pool.give_up(engine)
        else:
            has_received = status.has_received
            engine.observe(status, time.monotonic())
            engine.health.load_succeeded(version, time.monotonic())
            engine.is_lost = False
            self._on_event()
        finally:
            self._pool.end(engine)
            if meeting is not None:
                self._broadcasts.loaded(engine, has_received)
        self._pool.changed.set()

    async def _probe(self, engine: Engine) -> None:
        before = engine.health.state
        try:
            status = await engine.client.status(PROBE_DEADLINE_S)
        except EngineError as error:
            engine.health.probe_failed(str(error), time.monotonic())
        else:
            now_s = time.monotonic()
            engine.observe(status, now_s)
            engine.health.probe_succeeded(status.policy_version, now_s)
            if engine.requests and now_s - engine.progress_at_s > self._stuck_s:
                engine.health.hangs(f"has had work for {self._stuck_s:.0f} s and generated nothing", now_s)
        if engine.health.state is not before:
            self._judged(engine)

    def _judged(self, engine: Engine) -> None:
        """The engine's state has changed: what it was working on goes elsewhere if it is trusted no more."""
        log.info("engine %s is %s: %s", engine.name, engine.health.state, engine.health.cause)
        if engine.health.state is EngineState.QUARANTINED:
            self._pool.give_up(engine)
        self._pool.changed.set()
