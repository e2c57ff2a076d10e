import asyncio

import aiohttp
import msgspec
import pytest

from polyrhythm import messages
from polyrhythm.errors import RunError
from polyrhythm.observe.activity import Activity, ActivityReport, Span
from polyrhythm.observe.metrics import SAMPLE_COLUMNS
from polyrhythm.observe.status import GroupCounts
from polyrhythm.rewards.sandbox.frames import GroupScores, RewardFailure, TrainingState
from polyrhythm.types import rollout_seed


async def test_a_step_hands_out_every_group_once_and_commits(make_stage):
    stage = await make_stage(num_engines=2)
    assert (await stage.open(0))[0] == 200
    groups = await stage.all_groups(0)
    assert sorted(group.position for group in groups) == [0, 1, 2, 3]
    assert {rollout.policy_version for group in groups for rollout in group.rollouts} == {0}
    assert all([rollout.index for rollout in group.rollouts] == [0, 1] for group in groups)
    assert (await stage.commit(0, **{"loss/policy": 0.5}))[0] == 200
    ((step, row),) = stage.logger.rows
    assert step == 1
    assert (row["onpolicy/violations"], row["ledger/duplicates"], row["ledger/refused"], row["loss/policy"]) == (
        0,
        0,
        0,
        0.5,
    )
    assert [sample["prompt"] for sample in stage.logger.samples] == [f"problem {index}" for index in range(4)]
    await stage.open(1)
    assert sorted(group.problem_index for group in await stage.all_groups(1)) == [4, 5, 6, 7]


async def test_completions_are_those_of_the_rollouts_own_seeds(make_stage):
    stage = await make_stage()
    await stage.open(0)
    for group in await stage.all_groups(0):
        for rollout in group.rollouts:
            assert rollout.trace.token_ids[0] == rollout_seed(0, 0, group.problem_index, rollout.index) % 1000
            assert rollout.reward == rollout.trace.token_ids[0] % 2


async def test_the_first_group_is_handed_out_before_the_last_is_finished(make_stage):
    stage = await make_stage()
    last = stage.engines[0].hold("0/3")
    await stage.open(0)
    first = await stage.groups(0, 0)
    stage.events.append(("handed out", first.groups[0].position))
    last.set()
    await stage.all_groups(0)
    assert stage.events.index(("handed out", 0)) < stage.events.index(("answer", "engine-0", "0/3"))


async def test_weights_are_loaded_between_steps_only(make_stage):
    stage = await make_stage(num_engines=2)
    for version in range(3):
        await stage.open(version)
        await stage.all_groups(version)
        await stage.commit(version)
    for version in range(3):
        loads = [place for place, event in enumerate(stage.events) if event[0] == "load" and event[2] == version]
        served = [
            place
            for place, event in enumerate(stage.events)
            if event[2].__class__ is str and event[2][0] == str(version)
        ]
        assert len(loads) == 2
        assert max(loads) < min(served)
        assert all(event[2] >= version for event in stage.events[max(served) :] if event[0] == "load")


async def test_in_problem_order_only_the_contiguous_prefix_is_handed_out(make_stage):
    stage = await make_stage(num_engines=2, order="problem")
    first = stage.engines[0].hold("0/0")
    stage.engines[1].hold("0/0")
    await stage.open(0)
    await stage.until(lambda: len(stage.conductor.step.finished) == 3)
    assert (await stage.groups(0, 0, wait_s=0)).groups == []
    first.set()
    stage.engines[1].held["0/0"].set()
    assert [group.position for group in await stage.all_groups(0)] == [0, 1, 2, 3]


async def test_in_completion_order_groups_come_as_they_finish(make_stage):
    stage = await make_stage(num_engines=2)
    for engine in stage.engines:
        engine.hold("0/0")
    await stage.open(0)
    await stage.until(lambda: len(stage.conductor.step.finished) == 3)
    early = [group.position for group in (await stage.groups(0, 0)).groups]
    assert sorted(early) == [1, 2, 3]
    for engine in stage.engines:
        engine.held["0/0"].set()
    assert [group.position for group in await stage.all_groups(0)] == [*early, 0]


async def test_groups_go_to_the_least_loaded_engine_in_order(make_stage):
    stage = await make_stage(num_engines=2, rollout={"groups_per_step": 6})
    for engine in stage.engines:
        for position in range(6):
            engine.hold(f"0/{position}")
    await stage.open(0)
    await stage.until(lambda: sum(event[0] == "generate" for event in stage.events) == 4)
    asked = {name: [e[2] for e in stage.events if e[:2] == ("generate", name)] for name in ("engine-0", "engine-1")}
    assert {name: set(ids) for name, ids in asked.items()} == {"engine-0": {"0/0", "0/2"}, "engine-1": {"0/1", "0/3"}}
    assert (await stage.status()).groups == GroupCounts(expected=6, dispatched=4, complete=0, taken=0)


async def test_asking_again_changes_nothing(make_stage):
    stage = await make_stage()
    assert [(await stage.open(0))[0] for _ in range(2)] == [200, 200]
    groups = await stage.all_groups(0)
    assert (await stage.groups(0, 0)).groups == groups
    assert (await stage.groups(0, 2)).groups == groups[2:]
    assert (await stage.groups(0, 4, wait_s=0)).groups == []
    assert [(await stage.commit(0))[0] for _ in range(2)] == [200, 200]
    assert (await stage.open(1))[0] == 200
    assert len(stage.logger.rows) == 1
    assert stage.conductor.step.next_cursor == 8
    loads = [event for event in stage.events if event[0] == "load"]
    assert loads == [("load", "engine-0", 0), ("load", "engine-0", 1)]


async def test_engines_begin_the_next_step_as_soon_as_its_weights_are_published(make_stage):
    stage = await make_stage()
    await stage.open(0)
    await stage.all_groups(0)
    assert (await stage.published(1, **{"train/loss": 0.5}))[0] == 200
    # The trainer asks for nothing more: it may be writing a checkpoint.
    await stage.until(lambda: stage.conductor.step.version == 1 and stage.conductor.step.is_complete)
    assert [step for step, _ in stage.logger.rows] == [1]
    assert (await stage.open(1))[0] == 200
    await stage.all_groups(1)
    assert (await stage.published(2))[0] == 200
    first, second = (row for _, row in stage.logger.rows)
    assert "time/engines_idle_s" not in first and second["time/engines_idle_s"] > 0


async def test_the_weights_of_the_last_step_begin_no_other(make_stage):
    stage = await make_stage(num_steps=1)
    await stage.open(0)
    await stage.all_groups(0)
    assert [(await stage.published(1))[0] for _ in range(2)] == [200, 200]
    assert (await stage.published(2))[0] == 409
    assert (stage.conductor.step.version, stage.conductor.step.is_committed) == (0, True)
    assert (await stage.status()).waiting == "nobody: all steps are done"
    assert [event for event in stage.events if event[0] == "load"] == [("load", "engine-0", 0)]


async def test_steps_cannot_be_skipped_or_committed_early(make_stage):
    stage = await make_stage()
    assert (await stage.open(1))[0] == 409
    stage.engines[0].hold("0/3")
    await stage.open(0)
    assert (await stage.published(1))[0] == 409
    assert (await stage.published(2))[0] == 409
    assert stage.conductor.step.version == 0 and not stage.logger.rows
    assert (await stage.call("GET", "/steps/7/groups"))[0] == 409


async def test_open_waits_for_the_engines_that_are_still_starting(make_stage):
    stage = await make_stage(num_engines=0)
    opening = asyncio.create_task(stage.open(0))
    await asyncio.sleep(0.05)
    assert not opening.done()
    await stage.add_engine()
    assert (await opening)[0] == 200


async def test_metrics_say_what_the_step_was_like(make_stage):
    stage = await make_stage(correct_above=0.5)
    stage.scorer.reward = lambda columns, ids: (
        RewardFailure("broken") if columns["answer"] == 0 else float(columns["answer"] == 1)
    )
    await stage.open(0)
    await stage.all_groups(0)
    await stage.commit(0)
    row = stage.logger.rows[0][1]
    assert row["reward/mean"] == pytest.approx(1 / 3)
    assert row["reward/accuracy"] == pytest.approx(1 / 3)
    assert row["reward/excluded"] == 2
    assert row["groups/zero_variance"] == 4
    assert row["completion/tokens_mean"] == row["completion/tokens_min"] == row["completion/tokens_max"] == 2
    assert "data/epoch" not in row, "these problems have no end"
    assert row["completion/truncated_fraction"] == 0
    assert 0 <= row["generate/first_group_s"] <= row["generate/last_group_s"] <= row["time/step_s"]
    status = await stage.status()
    assert status.curves["reward/mean"] == [row["reward/mean"]]
    assert status.last_metrics == row


async def test_rewards_of_a_task_that_does_not_say_what_is_correct_have_no_accuracy(make_stage):
    stage = await make_stage()
    stage.scorer.reward = lambda columns, ids: 0.75
    await stage.open(0)
    await stage.all_groups(0)
    await stage.commit(0)
    assert stage.logger.rows[0][1]["reward/mean"] == 0.75
    assert "reward/accuracy" not in stage.logger.rows[0][1]
    assert (await stage.status()).curves["reward/accuracy"] == [None]


async def test_tokens_are_added_up_over_steps_and_epochs_counted(make_stage):
    stage = await make_stage(num_problems=8)  # a step has four
    for version in (0, 1):
        await stage.open(version)
        await stage.all_groups(version)
        await stage.commit(version, **{"train/tokens": 6})
    rows = [row for _, row in stage.logger.rows]
    assert [row["tokens/total_generated"] for row in rows] == [16, 32]
    assert [row["tokens/total_trained"] for row in rows] == [6, 12]
    assert [row["data/epoch"] for row in rows] == [0.5, 1.0]


@pytest.mark.parametrize(("asked", "expected"), [(0, 0), (3, 3), (4, 4), (7, 7), (8, 8), (9, 8)])
async def test_there_are_as_many_samples_as_asked_for_one_of_each_group_first(make_stage, asked, expected):
    stage = await make_stage(observe={"samples_per_step": asked})
    await stage.open(0)
    await stage.all_groups(0)
    await stage.commit(0)
    places = [(sample["rollout"], sample["position"]) for sample in stage.logger.samples]
    assert places == [(rollout, position) for rollout in (0, 1) for position in range(4)][:expected]


async def test_a_sample_says_what_it_is_of_and_how_long(make_stage):
    stage = await make_stage()
    await stage.open(0)
    await stage.all_groups(0)
    await stage.commit(0)
    sample = stage.logger.samples[1]
    assert {"step", "policy_version", *sample} == SAMPLE_COLUMNS.keys()
    assert (sample["problem"], sample["columns"], sample["prompt_tokens"]) == (1, {"answer": 1}, 3)
    assert sample["completion_tokens"] == 2 and sample["finish_reason"] == "stop"


async def test_reward_errors_are_logged_once_per_kind_with_a_count_and_the_traceback(make_stage, caplog):
    stage = await make_stage()

    def fails_often(columns, ids) -> float | RewardFailure:
        if columns["answer"] == 3:
            return RewardFailure("the reward took longer than 1 s")
        if columns["answer"] == 0:
            return 1.0
        return RewardFailure(f"ValueError: {ids}", "Traceback: line 5", origin="ValueError mine.py:5")

    stage.scorer.reward = fails_often
    await stage.open(0)
    await stage.all_groups(0)
    await stage.until(lambda: "rewards failed" in caplog.text)
    said = sorted(record.getMessage() for record in caplog.records if "rewards failed" in record.getMessage())
    assert len(said) == 2
    assert said[0] == "2 rewards failed in step 1, first for problem 3: the reward took longer than 1 s"
    assert said[1].startswith("4 rewards failed in step 1, first for problem 1: ValueError: [")
    assert said[1].endswith("\nTraceback: line 5")


async def test_a_step_whose_rewards_all_fail_ends_the_run_with_an_example(make_stage):
    stage = await make_stage()
    stage.scorer.reward = lambda columns, ids: RewardFailure("KeyError: 'gold'")
    await stage.open(0)
    with pytest.raises(RunError, match="every reward of step 1 failed, for example: KeyError: 'gold'"):
        await stage.run


async def test_a_step_without_any_signal_goes_on_and_is_counted(make_stage, caplog):
    stage = await make_stage(num_problems=8)
    stage.scorer.reward = lambda columns, ids: None
    await stage.open(0)
    await stage.all_groups(0)
    await stage.commit(0)
    row = stage.logger.rows[0][1]
    assert (row["reward/no_signal"], row["reward/excluded"], row["reward/mean"]) == (8, 0, 0.0)
    assert "no reward function applies to any rollout of step 1" in caplog.text
    await stage.open(1)
    await stage.all_groups(1)
    assert stage.scorer.states[0] == TrainingState(0, stage.conductor.config.num_steps, 0.0)
    assert stage.scorer.states[-1] == TrainingState(1, stage.conductor.config.num_steps, 0.5)


async def test_what_functions_say_and_log_is_in_metrics_and_samples(make_stage, caplog):
    stage = await make_stage(observe={"samples_per_step": 8})
    stage.scorer.amend = lambda scores: GroupScores(
        [1.0, 3.0],
        {"short": [1.0, None], "right": [0.0, 1.0]},
        extra={"parsed": ["a", "b"]},
        metrics={"length": [2.0, 4.0]} | {f"name{i}": [0.0] for i in range(120)},
        repeated=[RewardFailure("ValueError: together", origin="together")],
    )
    await stage.open(0)
    await stage.all_groups(0)
    await stage.commit(0)
    row = stage.logger.rows[0][1]
    assert (row["reward/short/mean"], row["reward/right/mean"], row["reward/right/std"]) == (1.0, 0.5, 0.5)
    assert row["reward_extra/length"] == 3.0
    assert sum(name.startswith("reward_extra/") for name in row) == 100
    sample = next(sample for sample in stage.logger.samples if sample["rollout"] == 1)
    assert sample["scores"] == {"short": None, "right": 1.0} and sample["extra"] == {"parsed": "b"}
    assert "more than 100 metrics in step 1" in caplog.text
    assert "failed for several completions together, not for each alone, in step 1" in caplog.text


async def test_the_status_shows_who_waits_for_whom(make_stage):
    stage = await make_stage()
    assert "first weights" in (await stage.status()).waiting
    stage.engines[0].hold("0/0")
    await stage.open(0)
    await stage.call(
        "POST", "/trainer/report", ActivityReport("trainer", Activity.WAIT, [Span("trainer", Activity.LOAD, 1.0, 2.0)])
    )
    status = await stage.status()
    assert status.waiting == "the trainer waits for engine-0"
    assert status.trainer.doing == "wait"
    assert Span("trainer", Activity.LOAD, 1.0, 2.0) in status.spans
    assert [(e.name, e.state, e.policy_version, e.is_busy) for e in status.engines] == [("engine-0", "ready", 0, True)]


async def test_a_stall_ends_the_run_and_says_who_waited(make_stage):
    stage = await make_stage(conductor={"stall_deadline_s": 0.5, "request_deadline_s": 30})
    stage.engines[0].hold("0/0")
    await stage.open(0)
    with pytest.raises(RunError, match="nothing has happened"):
        await stage.run


@pytest.mark.parametrize("path", ["/status", "/steps/0/groups", "/nothing"])
async def test_every_route_but_health_needs_the_admin_token(make_stage, path):
    stage = await make_stage()
    for token in ("", "wrong", "generate-token", "admin-tokenx", "ädmin"):
        assert (await stage.call("GET", path, token=token))[0] == 401
    assert (await stage.call("GET", "/health", token=""))[0] == 200


async def test_what_cannot_be_read_is_refused_and_nothing_happens(make_stage):
    stage = await make_stage()
    headers = {"Authorization": "Bearer admin-token", "Content-Type": messages.CONTENT_TYPE}
    bad_version = msgspec.msgpack.encode({"version": "zero"})
    async with aiohttp.ClientSession(headers=headers) as session:
        for body in (b"", b"\xc1", b"{}", bad_version, msgspec.msgpack.encode({"version": 0, "path": "../x"})):
            async with session.post(f"{stage.url}/weights/published", data=body) as response:
                assert response.status == 400
        async with session.post(f"{stage.url}/weights/published", json={"version": 0}) as response:
            assert response.status in (400, 415)
        for query in ("offset=-1", "offset=x", "wait_s=nan", "offset=1e99"):
            async with session.get(f"{stage.url}/steps/0/groups?{query}") as response:
                assert response.status == 400
    assert stage.conductor.step is None


async def test_a_start_that_takes_longer_than_the_stall_deadline_is_no_stall(make_stage):
    stage = await make_stage(conductor={"stall_deadline_s": 0.1})
    await asyncio.sleep(1.5)
    assert stage.conductor.failure is None
