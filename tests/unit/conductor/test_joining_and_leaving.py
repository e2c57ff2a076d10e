"""Engines come and go in the middle of a step, and the step is what it would have been without that."""

import asyncio

import msgspec

from polyrhythm import messages
from polyrhythm.conductor.engines.pool import MAX_GONE
from tests.unit.conductor.conftest import assert_undisturbed


async def test_an_engine_that_joins_in_the_middle_of_a_step_serves_in_it(make_stage):
    stage = await make_stage(rollout={"groups_per_step": 8})
    for position in range(8):
        stage.engines[0].hold(f"0/{position}")
    await stage.open(0)
    newcomer = await stage.add_engine()
    await stage.until(lambda: len(stage.conductor.step.finished) == 6)
    assert len(newcomer.requests) == 6
    stage.engines[0].release_all()
    assert_undisturbed(stage, await stage.all_groups(0))


async def test_draining_an_engine_loses_nothing(make_stage):
    stage = await make_stage(num_engines=2, rollout={"groups_per_step": 8})
    for engine in stage.engines:
        for position in range(8):
            engine.hold(f"0/{position}")
    await stage.open(0)
    await stage.until(lambda: len(stage.engines[0].requests) == 2)
    assert (await stage.call("POST", "/engines/drain", messages.EngineName("engine-0")))[0] == 200
    stage.engines[1].release_all()
    await stage.until(lambda: len(stage.conductor.step.finished) == 6)
    assert stage.engine_state("engine-0") == "draining"
    stage.engines[0].release_all()
    assert_undisturbed(stage, await stage.all_groups(0))
    assert (stage.conductor.step.num_retries, len(stage.engines[0].requests)) == (0, 2)
    await stage.until(lambda: stage.engine_state("engine-0") == "gone")
    await stage.commit(0)
    await stage.open(1)
    assert ("load", "engine-0", 1) not in stage.events


async def test_removing_an_engine_sends_its_work_elsewhere_at_once(make_stage):
    stage = await make_stage(num_engines=2, conductor={"request_deadline_s": 600})
    for position in range(4):
        stage.engines[0].hold(f"0/{position}")
    await stage.open(0)
    await stage.until(lambda: stage.engines[0].requests)
    assert (await stage.call("POST", "/engines/remove", messages.EngineName("engine-0")))[0] == 200
    assert_undisturbed(stage, await stage.all_groups(0))
    states = {
        engine["name"]: engine["state"] for engine in msgspec.json.decode((await stage.call("GET", "/engines"))[1])
    }
    assert states == {"engine-0": "gone", "engine-1": "ready"}


async def test_an_engine_that_was_restarted_takes_its_old_place(make_stage):
    stage = await make_stage(conductor={"request_deadline_s": 600})
    for position in range(4):
        stage.engines[0].hold(f"0/{position}")
    await stage.open(0)
    await stage.until(lambda: stage.engines[0].requests)
    await stage.add_engine("engine-0")
    assert_undisturbed(stage, await stage.all_groups(0))
    assert len((await stage.status()).engines) == 1


async def test_joining_twice_is_harmless(make_stage):
    stage = await make_stage()
    stage.engines[0].hold("0/0")
    await stage.open(0)
    await stage.call("POST", "/engines/join", stage.joining("engine-0", stage.engines[0].url))
    stage.engines[0].release_all()
    assert_undisturbed(stage, await stage.all_groups(0))
    assert stage.conductor.step.num_retries == 0


async def test_an_engine_without_a_sign_of_life_is_gone_and_must_join_again(make_stage):
    stage = await make_stage(num_engines=2, conductor={"lease_s": 0.5})
    await stage.open(0)
    await stage.engines[0].server.close()
    await stage.until(lambda: stage.engine_state("engine-0") == "gone")
    status, body = await stage.heartbeat(stage.engines[0])
    assert (status, b"join first" in body) == (409, True)
    assert (await stage.heartbeat(stage.engines[1]))[0] == 200


async def test_an_engine_that_was_drained_removed_or_replaced_is_told_to_leave(make_stage):
    stage = await make_stage(num_engines=3)
    drained, removed, replaced = stage.engines
    await stage.call("POST", "/engines/drain", messages.EngineName(drained.name))
    await stage.call("POST", "/engines/remove", messages.EngineName(removed.name))
    await stage.until(lambda: stage.engine_state(drained.name) == "gone")
    await stage.add_engine(replaced.name)
    assert await stage.heartbeat(drained) == (410, b"engine engine-0 was drained")
    assert await stage.heartbeat(removed) == (410, b"engine engine-1 was removed")
    assert (await stage.heartbeat(replaced))[0] == 410
    assert (await stage.heartbeat(stage.engines[-1]))[0] == 200


async def test_heartbeats_keep_an_engine_that_cannot_be_probed(make_stage):
    stage = await make_stage(num_engines=1, conductor={"lease_s": 0.4})
    stage.engines[0].status_fails = True
    for _ in range(10):
        assert (await stage.heartbeat(stage.engines[0]))[0] == 200
        await asyncio.sleep(0.1)
    assert stage.engine_state("engine-0") != "gone"


async def test_engines_that_are_long_gone_are_forgotten(make_stage):
    stage = await make_stage()
    for number in range(2 * MAX_GONE):
        await stage.call("POST", "/engines/join", stage.joining(f"spot-{number}", "http://127.0.0.1:1"))
        await stage.call("POST", "/engines/remove", messages.EngineName(f"spot-{number}"))
    assert len(stage.conductor.pool.engines) <= MAX_GONE + 2
    assert stage.engine_state("engine-0") != "gone"


async def test_an_engine_that_must_be_sent_weights_is_refused_with_the_reason(make_stage):
    stage = await make_stage()
    joining = stage.joining("sent", stage.engines[0].url, reads_store=False)
    status, body = await stage.call("POST", "/engines/join", joining)
    assert status == 409 and b"engine sent cannot read the weight store" in body
    assert [engine.name for engine in stage.conductor.pool.engines] == ["engine-0"]


async def test_each_engine_gets_as_many_groups_as_it_says_it_can_decode(make_stage):
    stage = await make_stage(num_engines=0, rollout={"groups_per_step": 12}, cluster={"num_engines": 2})
    small, large = await stage.add_engine("small", join=False), await stage.add_engine("large", join=False)
    for engine, max_completions in ((small, 2), (large, 12)):  # groups of 2: one more than 1 and than 6 in flight
        await stage.call(
            "POST", "/engines/join", stage.joining(engine.name, engine.url, max_completions=max_completions)
        )
        for position in range(12):
            engine.hold(f"0/{position}")
    await stage.open(0)
    await stage.until(lambda: (len(small.requests), len(large.requests)) == (2, 7))
    await asyncio.sleep(0.1)
    assert (len(small.requests), len(large.requests)) == (2, 7)
    small.release_all()
    large.release_all()
    assert len(await stage.all_groups(0)) == 12
