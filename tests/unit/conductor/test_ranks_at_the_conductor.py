"""Several ranks of one trainer at the conductor: who opens a step, who gets what, and what is shown of them."""

import asyncio

import pytest

from polyrhythm.messages import RankJoin
from polyrhythm.observe.activity import Activity, ActivityReport

TWO_RANKS = {"num_ranks": 2}


async def test_the_other_ranks_wait_until_the_first_has_published_the_weights(make_stage):
    stage = await make_stage(training=TWO_RANKS)
    second = asyncio.create_task(stage.call("GET", "/steps/0/ready?rank=1"))
    done, _ = await asyncio.wait([second], timeout=0.2)
    assert not done
    assert (await stage.open(0))[0] == 200
    async with asyncio.timeout(5):
        assert (await second)[0] == 200
    assert (await stage.call("GET", "/steps/0/ready?rank=1"))[0] == 200


async def test_a_rank_without_work_is_told_when_another_has_got_the_last_group(make_stage):
    stage = await make_stage(training=TWO_RANKS)
    last = stage.engines[0].hold("0/3")
    await stage.open(0)
    await stage.until(lambda: len(stage.conductor.step.finished) == 3)
    first = [group.position for group in (await stage.groups(0, 0, rank=0)).groups]
    second = [group.position for group in (await stage.groups(0, 0, rank=1)).groups]
    assert [len(first), len(second)] == [2, 1]
    waiting = [asyncio.create_task(stage.groups(0, num, rank=rank)) for rank, num in ((0, 2), (1, 1))]
    last.set()
    async with asyncio.timeout(5):
        answers = await asyncio.gather(*waiting)
    assert sorted(len(answer.groups) for answer in answers) == [0, 1]
    assert all(answer.is_last for answer in answers)
    received = [*first, *second, *(group.position for answer in answers for group in answer.groups)]
    assert sorted(received) == [0, 1, 2, 3]
    assert (await stage.status()).groups.taken == 4


async def test_a_step_is_not_committed_before_every_rank_has_taken_its_groups(make_stage):
    stage = await make_stage(training=TWO_RANKS, order="problem")
    await stage.open(0)
    await stage.until(lambda: stage.conductor.step.is_complete)
    assert len((await stage.groups(0, 0)).groups) == 2
    assert len((await stage.groups(0, 999)).groups) == 0
    status, said = await stage.commit(0)
    assert status == 409 and b"the ranks have taken 2 of the 4 groups" in said
    await stage.groups(0, 0, rank=1)
    assert (await stage.commit(0))[0] == 200


async def test_an_update_gets_no_groups_of_the_next_one(make_stage):
    stage = await make_stage(training={"updates_per_step": 2})
    await stage.open(0)
    await stage.until(lambda: stage.conductor.step.is_complete)
    first = await stage.groups(0, 0, until=2)
    assert (len(first.groups), first.is_last) == (2, True)
    second = await stage.groups(0, 2, until=4)
    assert sorted(group.position for group in first.groups + second.groups) == [0, 1, 2, 3]


@pytest.mark.parametrize("order", ["completion", "problem"])
async def test_sync_hands_out_nothing_before_all_groups_are_finished(make_stage, order):
    stage = await make_stage(schedule="sync", order=order)
    last = stage.engines[0].hold("0/3")
    await stage.open(0)
    await stage.until(lambda: len(stage.conductor.step.finished) == 3)
    early = await stage.groups(0, 0, wait_s=0)
    assert (early.groups, early.is_last) == ([], False)
    last.set()
    together = await stage.groups(0, 0)
    assert (sorted(group.position for group in together.groups), together.is_last) == ([0, 1, 2, 3], True)


async def test_a_rank_that_does_not_exist_gets_nothing(make_stage):
    stage = await make_stage(training=TWO_RANKS)
    await stage.open(0)
    for call in (
        stage.call("GET", "/steps/0/groups?rank=2"),
        stage.call("GET", "/steps/0/ready?rank=2"),
        stage.call("POST", "/trainer/report", ActivityReport("trainer-2", Activity.WAIT, [])),
    ):
        status, said = await call
        assert status == 409 and b"2" in said


async def test_the_trainer_works_while_one_of_its_ranks_does(make_stage):
    stage = await make_stage(training=TWO_RANKS)
    await stage.call("POST", "/trainer/report", ActivityReport("trainer-0", Activity.WAIT, []))
    await stage.call("POST", "/trainer/report", ActivityReport("trainer-1", Activity.FORWARD_BACKWARD, []))
    status = await stage.status()
    assert [(rank.name, rank.doing) for rank in status.ranks] == [
        ("trainer-0", "wait"), ("trainer-1", "forward_backward"),
    ]  # fmt: skip
    assert status.trainer.doing == "forward_backward"
    await stage.call("POST", "/trainer/report", ActivityReport("trainer-1", Activity.REDUCE, []))
    assert (await stage.status()).trainer.doing == "wait"


async def test_an_elastic_rank_that_is_gone_does_not_work_any_more_whatever_it_says(make_stage):
    stage = await make_stage(training={**TWO_RANKS, "elastic": True})
    ranks = stage.conductor.elastic
    for name in ("trainer-0", "trainer-1"):
        await ranks.join(RankJoin(name, f"{name}'s", 0.0), 0.0)
    works = ActivityReport("trainer-1", Activity.FORWARD_BACKWARD, [])
    assert (await stage.call("POST", "/trainer/report", works))[0] == 200
    assert (await stage.status()).trainer.doing == "forward_backward"
    ranks.remove("trainer-1")
    assert (await stage.call("POST", "/trainer/report", works))[0] == 200, "its thread does not know it yet"
    assert (await stage.status()).trainer.doing == "start"
