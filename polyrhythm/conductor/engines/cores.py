"""On one host the cores follow demand: whoever has work gets them, and when both have, they share as planned."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from urllib.parse import urlsplit

from polyrhythm.conductor.change import Change
from polyrhythm.conductor.engines.client import EngineError
from polyrhythm.conductor.engines.pool import Engine, EnginePool
from polyrhythm.conductor.trainer_state import TRAINER_WAITS_AT
from polyrhythm.observe.activity import Activity

TICK_S = 0.1
SET_DEADLINE_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CorePlan:
    """The cores of this host, and the threads of each rank and each engine while both sides have work."""

    num_cores: int
    trainer: int
    engine: int
    num_ranks: int = 1


def share_cores(plan: CorePlan, *, trainer_works: bool, num_busy_engines: int) -> CorePlan:
    """Who gets how many threads now: each side all of them, unless both have work. An idle side takes nothing by that."""
    if trainer_works and num_busy_engines:
        return plan
    return replace(
        plan,
        trainer=max(1, plan.num_cores // plan.num_ranks),
        engine=max(1, plan.num_cores // max(1, num_busy_engines)),
    )


@dataclass
class CoreBalance:
    """Tells engines and trainer how many threads to use, whenever that changes."""

    plan: CorePlan
    pool: EnginePool
    trainer_does: Callable[[], Activity]
    changed: Change
    trainer_changed: Change = field(default_factory=Change)
    num_changes: int = 0
    _told: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = self.plan

    async def run(self) -> None:
        """Consumes changes of the run, produces thread counts; waits for the next change, a tick at most."""
        while True:
            await self._balance()
            await self.changed.wait(TICK_S)

    async def trainer_threads(self, known: int, wait_s: float) -> int:
        """The trainer's thread count, as soon as it is not the known one."""
        until_s = asyncio.get_running_loop().time() + wait_s
        while self.now.trainer == known and (left_s := until_s - asyncio.get_running_loop().time()) > 0:
            await self.trainer_changed.wait(left_s)
        return self.now.trainer

    async def _balance(self) -> None:
        engines = [engine for engine in self.pool.present if _is_on_this_host(engine.url)]
        num_busy = sum(bool(engine.requests) for engine in engines)
        before = self.now
        self.now = share_cores(
            self.plan, trainer_works=self.trainer_does() not in TRAINER_WAITS_AT, num_busy_engines=num_busy
        )
        if self.now != before:
            self.num_changes += 1
            self.trainer_changed.set()
        adjustable = [engine for engine in engines if engine.capabilities.adjustable_threads]
        untold = [engine for engine in adjustable if self._told.get(engine.url) != self.now.engine]
        if untold:
            async with asyncio.TaskGroup() as tasks:
                for engine in untold:
                    tasks.create_task(self._tell(engine, self.now.engine))

    async def _tell(self, engine: Engine, num_threads: int) -> None:
        try:
            await engine.client.set_threads(num_threads, SET_DEADLINE_S)
            self._told[engine.url] = num_threads
        except EngineError as error:  # its probes will find out what is wrong with it
            log.info("engine %s was not told its threads: %s", engine.name, error)


def _is_on_this_host(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
