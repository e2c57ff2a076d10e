"""Who is invited to a broadcast of new weights: a sender that asks, and engines that hold the version before and can receive."""

import asyncio

import pytest

from polyrhythm.conductor.engines.broadcast import ASKS_AGAIN_S, MAX_MISSES, Broadcasts
from polyrhythm.conductor.engines.health import EngineHealth, EngineState
from polyrhythm.conductor.engines.pool import Engine
from polyrhythm.messages import Capabilities, Meeting

DEADLINE_S = 20.0


def engine(name: str, num_receivers: int = 1, version: int = 4, state: EngineState = EngineState.READY) -> Engine:
    capable = Capabilities(8, False, True, False, num_receivers)
    health = EngineHealth(since_s=0.0, state=state, policy_version=version)
    return Engine(name, "http://e", None, health, capable, max_groups=1)  # type: ignore[arg-type]


@pytest.fixture
async def broadcasts():
    """A sender asks for versions above 0."""
    broadcasts = Broadcasts(load_deadline_s=40.0)
    asking = asyncio.create_task(broadcasts.next_for_sender(0, DEADLINE_S))
    await asyncio.sleep(0)
    yield broadcasts
    asking.cancel()


async def test_each_process_of_an_engine_is_a_member_behind_the_sender(broadcasts):
    one, two = engine("one", num_receivers=2), engine("two")
    broadcasts.plan(5, [one, two])
    for_sender = await broadcasts.next_for_sender(4, DEADLINE_S)
    assert for_sender == Meeting(version=5, number=1, member=0, num_members=4, deadline_s=20.0)
    assert [broadcasts.take(one, 5).member, broadcasts.take(two, 5).member] == [1, 3]
    assert broadcasts.take(one, 5) is None, "who loads again reads the store"


async def test_newcomers_and_engines_that_cannot_receive_read_the_store(broadcasts):
    others = [
        engine("embedded", num_receivers=0), engine("late", version=3), engine("new", state=EngineState.JOINING),
        engine("sick", state=EngineState.SUSPECT),
    ]  # fmt: skip
    broadcasts.plan(5, others)
    assert not any(broadcasts.take(other, 5) for other in others) and broadcasts.rendezvous.epoch == 0
    broadcasts.plan(5, [*others, engine("able")])
    assert (await broadcasts.next_for_sender(4, DEADLINE_S)).num_members == 2


async def test_nobody_is_invited_if_nobody_would_send(monkeypatch):
    broadcasts, able = Broadcasts(load_deadline_s=40.0), engine("able")
    broadcasts.plan(5, [able])
    assert broadcasts.take(able, 5) is None
    assert await broadcasts.next_for_sender(0, 0.0) is None
    broadcasts.plan(5, [able])
    assert broadcasts.take(able, 5) is not None, "it will ask again at once"
    broadcasts._asked_s -= ASKS_AGAIN_S
    broadcasts.plan(6, [engine("able", version=5)])
    assert await broadcasts.next_for_sender(5, 0.0) is None, "it has gone"


async def test_the_keys_of_a_broadcast_are_forgotten_with_the_next(broadcasts):
    broadcasts.plan(5, [engine("able")])
    broadcasts.rendezvous.set(1, "key", b"address")
    broadcasts.plan(6, [engine("able", version=5)])
    assert broadcasts.rendezvous.epoch == 2 and not broadcasts.rendezvous.has(2, ["key"])


async def test_an_engine_that_broadcasts_do_not_reach_is_invited_no_more(broadcasts):
    able = engine("able")
    for _ in range(MAX_MISSES):
        broadcasts.plan(5, [able])
        assert broadcasts.take(able, 5) is not None
        broadcasts.loaded(able, has_received=False)
    broadcasts.plan(5, [able])
    assert broadcasts.take(able, 5) is None
