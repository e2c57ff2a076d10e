"""Cores follow demand."""

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest

from polyrhythm.conductor.change import Change
from polyrhythm.conductor.engines.client import EngineError
from polyrhythm.conductor.engines.cores import CoreBalance, CorePlan, share_cores
from polyrhythm.messages import Capabilities
from polyrhythm.observe.activity import Activity

PLAN = CorePlan(num_cores=8, trainer=4, engine=2)


@pytest.mark.parametrize(
    ("trainer_works", "num_busy_engines", "trainer", "engine"),
    [(True, 2, 4, 2), (True, 0, 8, 8), (False, 2, 8, 4), (False, 1, 8, 8), (False, 20, 8, 1), (False, 0, 8, 8)],
)
def test_who_has_work_gets_the_cores(trainer_works, num_busy_engines, trainer, engine):
    shares = share_cores(PLAN, trainer_works=trainer_works, num_busy_engines=num_busy_engines)
    assert (shares.trainer, shares.engine) == (trainer, engine)


CAPABLE = Capabilities(8, adjustable_threads=True, reads_store=True, openai_routes=True)


@dataclass
class FakeEngine:
    url: str
    requests: set = field(default_factory=set)
    told: list[int] = field(default_factory=list)
    name: str = "engine-0"
    fails: bool = False
    capabilities: Capabilities = CAPABLE

    @property
    def client(self):
        return self

    async def set_threads(self, num_threads, deadline_s):
        if self.fails:
            raise EngineError("gone")
        self.told.append(num_threads)


@dataclass
class FakePool:
    present: list[FakeEngine]


async def settle(changed: Change):
    for _ in range(5):
        changed.set()
        await asyncio.sleep(0)


async def test_engines_and_trainer_are_told_when_demand_changes():
    engine, far = FakeEngine("http://127.0.0.1:1"), FakeEngine("http://192.0.2.7:1", requests={1})
    doing, changed = [Activity.WAIT], Change()
    cores = CoreBalance(CorePlan(2, 1, 1), FakePool([engine, far]), lambda: doing[0], changed)
    task = asyncio.create_task(cores.run())
    engine.requests.add(1)
    await settle(changed)
    assert engine.told == [2], "the trainer waits: the engine has both cores"
    doing[0] = Activity.FORWARD_BACKWARD
    await settle(changed)
    assert engine.told == [2, 1]
    assert cores.now.trainer == 1
    waiting = asyncio.create_task(cores.trainer_threads(known=1, wait_s=5.0))
    engine.requests.clear()
    await settle(changed)
    assert await waiting == 2, "the engine is done: the trainer has both cores"
    assert far.told == [], "an engine on another host has its own cores"
    task.cancel()


async def test_an_engine_that_cannot_be_told_is_told_again():
    engine, changed = FakeEngine("http://localhost:1", fails=True), Change()
    cores = CoreBalance(CorePlan(2, 1, 1), FakePool([engine]), lambda: Activity.WAIT, changed)
    task = asyncio.create_task(cores.run())
    await settle(changed)
    engine.fails = False
    await settle(changed)
    assert engine.told == [2]
    task.cancel()


async def test_an_engine_whose_threads_are_fixed_is_told_nothing_and_counts_as_busy():
    fixed = FakeEngine(
        "http://localhost:1", requests={1}, capabilities=msgspec.structs.replace(CAPABLE, adjustable_threads=False)
    )
    adjustable, changed = FakeEngine("http://localhost:2", requests={1}), Change()
    cores = CoreBalance(CorePlan(4, 2, 1), FakePool([fixed, adjustable]), lambda: Activity.WAIT, changed)
    task = asyncio.create_task(cores.run())
    await settle(changed)
    assert (fixed.told, adjustable.told) == ([], [2])
    task.cancel()
