"""Faults of engines, one by one: each has fired, and the step is what it would have been without it."""

import asyncio
import math
import time

import msgspec
import pytest
from aiohttp import web

from polyrhythm import messages
from polyrhythm.errors import RunError
from polyrhythm.messages import GenerateReply
from polyrhythm.observe.activity import Activity, ActivityReport, Span
from polyrhythm.rewards.sandbox.frames import RewardFailure
from tests.unit.conductor.conftest import assert_undisturbed


def with_completion(reply: GenerateReply, **changes) -> GenerateReply:
    """The reply with its first completion altered."""
    first = msgspec.structs.replace(reply.completions[0], **changes)
    return msgspec.structs.replace(reply, completions=[first, *reply.completions[1:]])


FAULTS = {
    "http 500": lambda reply: web.Response(status=500, text="out of memory"),
    "truncated answer": lambda reply: web.Response(
        body=messages.encode(reply)[:-5], content_type=messages.CONTENT_TYPE
    ),
    "not msgpack": lambda reply: web.Response(text="<html>"),
    "connection reset": lambda reply: ConnectionResetError(),
    "wrong version": lambda reply: msgspec.structs.replace(reply, policy_version=7),
    "too few completions": lambda reply: msgspec.structs.replace(reply, completions=reply.completions[:1]),
    "nan": lambda reply: with_completion(reply, rollout_logprobs=[math.nan, -1.0]),
    "lengths differ": lambda reply: with_completion(reply, rollout_logprobs=[-1.0]),
    "alien token": lambda reply: with_completion(reply, token_ids=[10**6, 1]),
    "empty completion": lambda reply: with_completion(reply, token_ids=[], rollout_logprobs=[]),
    "answer to another request": lambda reply: msgspec.structs.replace(reply, request_id="0/9/9/0"),
}


def once(fault):
    """Misbehave at the first request; the list is the witness."""
    fired = []

    def answer(request, reply):
        if fired:
            return reply
        fired.append(request.request_id)
        return fault(reply)

    return answer, fired


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_changes_nothing(make_stage, fault, num_engines):
    stage = await make_stage(num_engines=num_engines)
    stage.engines[0].answer, fired = once(FAULTS[fault])
    await stage.open(0)
    groups = await stage.all_groups(0)
    assert fired
    assert_undisturbed(stage, groups)
    await stage.commit(0)
    row = stage.logger.rows[0][1]
    assert row["dispatch/retries"] >= 1
    assert row["onpolicy/violations"] == (2 if fault == "wrong version" else 0)
    assert row["ledger/duplicates"] == (2 if fault == "answer to another request" else 0)
    assert row["groups/replaced"] == 0


async def test_only_the_rollouts_that_are_missing_are_asked_for_again(make_stage):
    stage = await make_stage()
    stage.engines[0].answer, fired = once(FAULTS["nan"])
    await stage.open(0)
    await stage.all_groups(0)
    first, again = (r for r in stage.engines[0].requests if r.request_id.split("/")[1] == fired[0].split("/")[1])
    assert (len(first.seeds), again.seeds) == (2, first.seeds[:1])


async def test_an_engine_that_always_fails_is_quarantined_and_the_others_do_its_work(make_stage):
    stage = await make_stage(num_engines=2, rollout={"groups_per_step": 8})
    stage.engines[0].answer = lambda request, reply: web.Response(status=500)
    await stage.open(0)
    assert_undisturbed(stage, await stage.all_groups(0))
    assert stage.engine_state("engine-0") in ("suspect", "quarantined", "loading")
    assert stage.engine_state("engine-1") == "ready"


async def test_an_engine_that_dies_in_the_middle_of_a_group_loses_nothing(make_stage):
    stage = await make_stage(num_engines=2)
    for position in range(4):
        stage.engines[0].hold(f"0/{position}")
    await stage.open(0)
    await stage.until(lambda: stage.engines[0].requests)
    stage.engines[0].release_all()
    stage.engines[0].answer = lambda request, reply: ConnectionResetError()
    stage.engines[0].status_fails = True
    stage.engines[0].load = lambda version: web.Response(status=500)
    assert_undisturbed(stage, await stage.all_groups(0))


async def test_an_engine_that_stops_answering_probes_is_given_up_with_its_work(make_stage):
    stage = await make_stage(num_engines=2, conductor={"request_deadline_s": 60})
    for position in range(4):
        stage.engines[0].hold(f"0/{position}")
    await stage.open(0)
    await stage.until(lambda: stage.engines[0].requests)
    stage.engines[0].status_fails = True
    assert_undisturbed(stage, await stage.all_groups(0))


async def test_an_engine_that_answers_probes_and_generates_nothing_is_given_up(make_stage):
    stage = await make_stage(num_engines=2, conductor={"request_deadline_s": 2})
    for position in range(4):
        stage.engines[0].hold(f"0/{position}")
    await stage.open(0)
    assert_undisturbed(stage, await stage.all_groups(0))
    assert stage.conductor.pool.get("engine-0").health.num_request_failures == 1


async def test_a_request_that_is_never_answered_goes_elsewhere_at_its_deadline(make_stage, monkeypatch):
    monkeypatch.setattr("polyrhythm.conductor.conductor.STUCK_FRACTION", 100)
    stage = await make_stage(num_engines=2, conductor={"request_deadline_s": 0.3})
    stage.engines[0].hold("0/0")
    await stage.open(0)
    assert_undisturbed(stage, await stage.all_groups(0))
    assert stage.conductor.step.num_retries >= 1


async def test_requests_that_miss_their_deadline_together_are_all_sent_again(make_stage, monkeypatch):
    monkeypatch.setattr("polyrhythm.conductor.conductor.STUCK_FRACTION", 100)
    stage = await make_stage(
        num_engines=2, rollout={"groups_per_step": 16}, engine={"max_batch": 16}, conductor={"request_deadline_s": 0.5}
    )
    for position in range(16):
        stage.engines[0].hold(f"0/{position}")
    await stage.open(0)
    assert_undisturbed(stage, await stage.all_groups(0))
    assert stage.conductor.step.num_retries >= 8


async def test_an_engine_that_failed_to_load_serves_nothing_until_a_good_load(make_stage):
    stage = await make_stage(num_engines=2, rollout={"groups_per_step": 8})
    failures = [web.Response(status=500, text="torn"), 3]
    stage.engines[0].load = lambda version: failures.pop(0) if failures else version
    for engine in stage.engines:
        engine.hold("0/7")
    await stage.open(0)
    await stage.until(lambda: not failures and stage.engine_state("engine-0") == "ready")
    loads = [place for place, event in enumerate(stage.events) if event == ("load", "engine-0", 0)]
    served = [place for place, event in enumerate(stage.events) if event[:2] == ("generate", "engine-0")]
    assert len(loads) == 3
    assert all(place > loads[2] for place in served)
    for engine in stage.engines:
        engine.release_all()
    assert_undisturbed(stage, await stage.all_groups(0))


async def test_an_engine_that_lost_its_weights_is_made_to_load_them_again(make_stage):
    stage = await make_stage()
    stage.engines[0].hold("0/3")
    await stage.open(0)
    stage.engines[0].policy_version = -1
    await stage.until(lambda: [e[0] for e in stage.events].count("load") == 2)
    stage.engines[0].release_all()
    assert_undisturbed(stage, await stage.all_groups(0))


async def test_a_problem_that_engines_refuse_is_replaced_and_counted(make_stage):
    stage = await make_stage()
    stage.engines[0].answer = lambda request, reply: (
        web.Response(status=400, text="the prompt is too long") if request.prompt_ids[-1] == 2 else reply
    )
    await stage.open(0)
    assert sorted(group.problem_index for group in await stage.all_groups(0)) == [0, 1, 3, 4]
    assert stage.engine_state("engine-0") == "ready"
    await stage.commit(0)
    assert stage.logger.rows[0][1]["groups/replaced"] == 1
    await stage.open(1)
    assert sorted(group.problem_index for group in await stage.all_groups(1)) == [5, 6, 7, 8]


async def test_an_engine_that_refuses_everything_costs_no_problem_while_another_takes_them(make_stage):
    stage = await make_stage(num_engines=2)
    stage.engines[0].answer = lambda request, reply: web.Response(status=413, text="it does not fit in my cache")
    await stage.open(0)
    assert_undisturbed(stage, await stage.all_groups(0))
    positions = [request.request_id.split("/")[1] for request in stage.engines[0].requests]
    assert positions, "it was asked"
    assert len(positions) == len(set(positions)), "and never twice for the same"
    await stage.commit(0)
    assert stage.logger.rows[0][1]["groups/replaced"] == 0


async def test_an_engine_that_restarts_is_waited_for_before_a_problem_is_replaced(make_stage):
    stage = await make_stage(num_engines=2, conductor={"request_deadline_s": 30})
    roomy, small = stage.engines
    small.answer = lambda request, reply: web.Response(status=413, text="it does not fit in my cache")
    for position in range(4):
        roomy.hold(f"0/{position}")
    await stage.open(0)
    await stage.until(lambda: small.requests and roomy.requests)
    await roomy.server.close()
    await stage.until(lambda: stage.engine_state(roomy.name) != "ready")
    await asyncio.sleep(0.3)
    await stage.add_engine(roomy.name)
    assert_undisturbed(stage, await stage.all_groups(0))
    assert stage.conductor.step.num_replaced == 0


async def test_an_engine_that_stays_away_is_not_waited_for_longer_than_it_may_take_to_start(make_stage):
    stage = await make_stage(num_engines=2, engine={"start_deadline_s": 0.5}, conductor={"request_deadline_s": 30})
    roomy, small = stage.engines
    small.answer = lambda request, reply: (
        web.Response(status=413, text="it does not fit in my cache") if request.prompt_ids[-1] < 4 else reply
    )
    for position in range(4):
        roomy.hold(f"0/{position}")
    await stage.open(0)
    await stage.until(lambda: small.requests and roomy.requests)
    await roomy.server.close()
    assert sorted(group.problem_index for group in await stage.all_groups(0)) == [4, 5, 6, 7]


async def test_an_engine_that_refuses_a_hedge_is_not_asked_for_it_again(make_stage):
    stage = await make_stage(conductor={"hedge_groups": 4, "request_deadline_s": 30})
    release = stage.engines[0].hold("0/3")
    await stage.open(0)
    await stage.until(lambda: len(stage.conductor.step.finished) == 3)
    small = await stage.add_engine(join=False)
    small.answer = lambda request, reply: web.Response(status=413, text="it does not fit in my cache")
    await stage.call("POST", "/engines/join", stage.joining(small.name, small.url))
    await stage.until(lambda: small.requests)
    await asyncio.sleep(0.5)
    assert len(small.requests) == stage.conductor.step.num_hedged == 1
    release.set()
    assert_undisturbed(stage, await stage.all_groups(0))


async def test_groups_whose_rewards_all_failed_are_made_again_when_the_run_is_resumed(make_stage):
    first = await make_stage()
    first.scorer.reward = lambda columns, ids: RewardFailure("the reward took too long")
    await first.open(0)
    with pytest.raises(RunError, match=r"every reward of step 1 failed.*took too long"):
        await first.run
    resumed = await make_stage()
    await resumed.open(0)
    assert_undisturbed(resumed, await resumed.all_groups(0))
    assert len(resumed.engines[0].requests) == 4


async def test_when_every_problem_is_refused_the_run_ends_with_the_cause(make_stage):
    stage = await make_stage()
    stage.engines[0].answer = lambda request, reply: web.Response(status=400, text="the prompt is too long")
    await stage.open(0)
    with pytest.raises(RunError, match="the prompt is too long"):
        await stage.run
    assert stage.engine_state("engine-0") == "ready"


@pytest.mark.parametrize(
    ("load", "cause"),
    [
        (lambda version: web.Response(status=422, text="digest mismatch"), "did not load version 0.*digest mismatch"),
        (lambda version: 5, "it holds version 5 after loading 0"),
    ],
)
async def test_when_no_engine_can_load_the_run_ends_with_the_cause(make_stage, load, cause):
    stage = await make_stage(engine={"start_deadline_s": 0.5})
    stage.engines[0].load = load
    status, body = await stage.open(0)
    assert status == 503
    assert b"no engine could serve version 0" in body
    with pytest.raises(RunError, match=cause):
        await stage.run


async def test_when_the_last_engine_is_gone_the_run_ends_with_the_cause(make_stage):
    stage = await make_stage(engine={"start_deadline_s": 0.5})
    stage.engines[0].hold("0/0")
    await stage.open(0)
    await stage.call("POST", "/engines/remove", messages.EngineName("engine-0"))
    status, body = await stage.call("GET", "/steps/0/groups?offset=3&wait_s=10")
    assert (status, b"engine-0 is gone: removed" in body) == (503, True)


async def test_the_last_stragglers_are_asked_of_idle_engines_too(make_stage):
    stage = await make_stage(num_engines=2, conductor={"hedge_groups": 2, "request_deadline_s": 60})
    stage.engines[0].hold("0/0")
    await stage.open(0)
    assert_undisturbed(stage, await stage.all_groups(0))
    await stage.commit(0)
    row = stage.logger.rows[0][1]
    assert row["dispatch/hedged"] >= 1
    assert row["dispatch/retries"] == 0


async def test_a_conductor_started_again_goes_on_with_what_was_finished(make_stage):
    stage = await make_stage()
    await stage.open(0)
    first = await stage.all_groups(0)
    await stage.commit(0)
    stage.engines[0].hold("1/3")
    await stage.open(1)
    await stage.until(lambda: len(stage.conductor.step.finished) == 3)
    before = (await stage.groups(1, 0)).groups
    stage.run.cancel()

    resumed = await make_stage()
    assert (await resumed.open(1))[0] == 200
    groups = await resumed.all_groups(1)
    assert [group for group in groups if group.position != 3] == before
    assert sorted(group.problem_index for group in groups) == [4, 5, 6, 7]
    assert [event for event in resumed.events if event[0] == "generate"] == [("generate", "engine-0", "1/3")]
    assert not {group.problem_index for group in first} & {group.problem_index for group in groups}
    assert (await resumed.commit(1))[0] == 200


async def test_a_trainer_that_only_waits_does_not_hide_a_stall(make_stage):
    stage = await make_stage(conductor={"stall_deadline_s": 0.5, "request_deadline_s": 30})
    stage.engines[0].hold("0/0")
    await stage.open(0)

    async def poll() -> None:
        while True:
            span = Span("trainer", Activity.WAIT, time.time() - 0.1, time.time())
            await stage.call("POST", "/trainer/report", ActivityReport("trainer", Activity.WAIT, [span]))
            await asyncio.sleep(0.1)

    polling = asyncio.create_task(poll())
    async with asyncio.timeout(5):
        with pytest.raises(RunError, match="nothing has happened"):
            await stage.run
    polling.cancel()


async def test_an_engine_that_generates_is_no_stall(make_stage):
    stage = await make_stage(conductor={"stall_deadline_s": 0.5, "request_deadline_s": 30})
    release = stage.engines[0].hold("0/0")
    await stage.open(0)
    engine = stage.conductor.pool.get("engine-0")
    for _ in range(15):
        await asyncio.sleep(0.1)
        engine.progress_at_s = time.monotonic()  # as a probe that saw more tokens than the last one
    release.set()
    assert_undisturbed(stage, await stage.all_groups(0))


async def test_the_dump_of_a_stall_names_everybody(make_stage, caplog):
    stage = await make_stage(conductor={"stall_deadline_s": 0.5, "request_deadline_s": 30})
    stage.engines[0].hold("0/0")
    await stage.open(0)
    await stage.call("POST", "/trainer/report", ActivityReport("trainer", Activity.WAIT, []))
    with pytest.raises(RunError, match="the trainer waits for engine-0"):
        await stage.run
    assert "engine engine-0: ready" in caplog.text
    assert "has position 0" in caplog.text
    assert "trainer: wait for" in caplog.text
