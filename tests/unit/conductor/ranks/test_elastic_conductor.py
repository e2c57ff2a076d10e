"""Elastic ranks at the conductor, in one process: who founds, who is given up, who leaves, and whose the publication is."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from polyrhythm.conductor.change import Change
from polyrhythm.conductor.ranks.elastic import ElasticRanks
from polyrhythm.conductor.ranks.rendezvous import Rendezvous
from polyrhythm.conductor.refusals import Conflict, Dismissed
from polyrhythm.conductor.steps.assignment import GroupAssignment
from polyrhythm.config import load_config
from polyrhythm.messages import (
    SAVE_DUTY,
    RankDuty,
    RankEnter,
    RankJoin,
    RankReady,
    RankReduced,
    RankStay,
    publish_duty,
)
from tests.conftest import make_group

GROUPS = [make_group(position) for position in range(4)]


class Scene:
    """Two ranks of a run with steps of four groups."""

    def __init__(self):
        training = {"num_ranks": 2, "elastic": True}
        config = load_config([], {"num_steps": 2, "training": training, "rollout": {"groups_per_step": 4}})
        self.failures: list[str] = []
        self.ranks = ElasticRanks(
            config, 0, Rendezvous(), check=lambda: None, event=lambda: None, fail=self.failures.append,
            forget=lambda name: None,
        )  # fmt: skip

    def open(self, version: int) -> None:
        assignment = GroupAssignment([], 10_000, lambda group: 1, in_turn=True)
        self.step = SimpleNamespace(
            version=version, number=version + 1, num_groups=4, assignment=assignment, changed=Change()
        )
        self.ranks.begin_step(self.step)

    async def join(self, *names: str) -> None:
        for name in names:
            await self.ranks.join(RankJoin(name, f"{name}'s", 0.0), 0.0)

    async def enter(self, name: str, holds: int, has_state: bool = True) -> str:
        return (await self.ranks.enter(RankEnter(f"{name}'s", holds, has_state, 0.0), 0.0)).what

    async def train(self, *names: str) -> None:
        """All of them take their groups, add up and commit."""
        for name in names:
            self.step.assignment.share(GROUPS, f"{name}'s", 0, 4)
        owned = {name: self.step.assignment.owned(f"{name}'s") for name in names}
        answers = await asyncio.gather(
            *(self.ranks.ready(RankReady(f"{name}'s", owned[name], b"", 1.0), 1.0) for name in names)
        )
        assert [answer.what for answer in answers] == ["go"] * len(names)
        reduced = [RankReduced(f"{name}'s", answers[0].epoch, "sum", 1.0) for name in names]
        verdicts = await asyncio.gather(*(self.ranks.reduced(said, 1.0) for said in reduced), return_exceptions=True)
        assert all(isinstance(verdict, Dismissed) or verdict.what == "commit" for verdict in verdicts)

    async def duty(self, name: str, duty: str) -> str:
        return (await self.ranks.duty(RankDuty(f"{name}'s", duty), 0.0)).what


@pytest.fixture
async def scene() -> Scene:
    """Both have entered step 1."""
    scene = Scene()
    await scene.join("trainer-1", "trainer-0")
    assert await scene.enter("trainer-1", -1) == "wait", "it is not the first"
    assert await scene.enter("trainer-0", -1) == "found"
    scene.open(0)
    assert await scene.enter("trainer-0", 0) == "train"
    assert not scene.ranks.may_deal_to("trainer-0's"), "the other one is still loading"
    assert await scene.enter("trainer-1", -1) == "load"
    assert await scene.enter("trainer-1", 0) == "train"
    assert scene.ranks.may_deal_to("trainer-0's")
    return scene


async def test_when_the_publisher_is_lost_after_the_commit_the_next_one_publishes(scene):
    await scene.train("trainer-0", "trainer-1")
    assert await scene.duty("trainer-0", publish_duty(1)) == "yours"
    waiting = asyncio.create_task(scene.ranks.duty(RankDuty("trainer-1's", publish_duty(1)), 5.0))
    await asyncio.sleep(0)
    scene.ranks.ended("trainer-0")
    assert (await waiting).what == "yours"
    assert scene.ranks.num_lost == 1 and scene.step.assignment.num_returned == 0
    scene.open(1)
    assert await scene.duty("trainer-1", publish_duty(1)) == "done"


async def test_whoever_hangs_up_or_is_silent_for_a_lease_is_given_up(scene):
    waiting = asyncio.create_task(scene.ranks.stay(RankStay("trainer-1's", 0, 5.0), 5.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert [member.name for member in scene.ranks.members.present] == ["trainer-0"]
    with pytest.raises(Conflict, match="trainer-1 was given up: its connection was closed"):
        await scene.enter("trainer-1", 0)
    scene.ranks.members.get("trainer-0's").seen_s = time.monotonic() - 1000
    assert scene.ranks.why_lost(is_over=False) is None
    assert set(scene.ranks.lost_at) == {"trainer-0", "trainer-1"}
    assert not scene.failures, "no update was made yet: whoever joins begins as these did"


async def test_without_a_rank_that_holds_the_optimizers_state_the_run_cannot_go_on(scene):
    await scene.train("trainer-0", "trainer-1")
    scene.open(1)
    await scene.join("trainer-2")
    assert await scene.enter("trainer-2", 1, has_state=False) == "train"
    scene.ranks.ended("trainer-0")
    assert not scene.failures
    scene.ranks.ended("trainer-1")
    assert "no rank is left that holds the state of the optimizer" in scene.failures[0]


async def test_a_drained_rank_leaves_after_the_update_and_a_removed_one_at_once(scene):
    scene.ranks.drain("trainer-1")
    assert scene.ranks.members.get("trainer-1's").state == "leaving"
    await scene.train("trainer-0", "trainer-1")
    assert scene.step.assignment.num_returned == 0, "what it had trained on is in the update"
    with pytest.raises(Dismissed, match="rank trainer-1 was drained"):
        await scene.duty("trainer-1", publish_duty(1))
    await scene.join("trainer-2")
    scene.ranks.remove("trainer-2")
    with pytest.raises(Dismissed, match="rank trainer-2 was removed"):
        await scene.join("trainer-2")
    with pytest.raises(Conflict, match="there is no rank 'trainer-9'"):
        scene.ranks.drain("trainer-9")


async def test_who_comes_while_gradients_are_added_up_waits_for_the_next_step(scene):
    await scene.train("trainer-0", "trainer-1")
    await scene.join("trainer-2")
    assert await scene.enter("trainer-2", 0) == "wait"
    scene.open(1)
    assert await scene.enter("trainer-2", 0) == "load"


async def test_who_publishes_is_let_go_only_when_it_has_published(scene):
    await scene.train("trainer-0", "trainer-1")
    assert await scene.duty("trainer-0", publish_duty(1)) == "yours"
    scene.ranks.drain("trainer-0")
    assert await scene.duty("trainer-1", publish_duty(1)) == "wait", "two would write the same files"
    scene.open(1)
    with pytest.raises(Dismissed, match="rank trainer-0 was drained"):
        await scene.enter("trainer-0", 1)
    await scene.train("trainer-1")
    await scene.join("trainer-2")
    scene.ranks.remove("trainer-1")
    assert await scene.duty("trainer-1", publish_duty(2)) == "yours", "removed or drained: it has nothing to train on"
    assert not scene.failures


async def test_who_waits_to_take_part_when_the_run_ends_is_dismissed(scene):
    await scene.train("trainer-0", "trainer-1")
    scene.open(1)
    await scene.train("trainer-0", "trainer-1")
    await scene.join("trainer-2")
    waiting = asyncio.create_task(scene.ranks.enter(RankEnter("trainer-2's", 1, False, 5.0), 5.0))
    await asyncio.sleep(0)
    scene.ranks.close_step(scene.step)
    with pytest.raises(Dismissed, match="the run is over"):
        await waiting
    assert await scene.duty("trainer-0", SAVE_DUTY) == "yours"


async def test_who_came_without_the_state_of_the_optimizer_does_not_speak_for_all(scene):
    await scene.train("trainer-0", "trainer-1")
    scene.open(1)
    scene.ranks.ended("trainer-0")
    await scene.ranks.join(RankJoin("trainer-0", "its successor", 0.0), 0.0)
    assert (await scene.ranks.enter(RankEnter("its successor", 1, False, 0.0), 0.0)).what == "train"
    news = [await scene.ranks.stay(RankStay(id, 0, 0.0), 0.0) for id in ("its successor", "trainer-1's")]
    assert [said.is_first for said in news] == [False, True], "it could not save what is finished"
    assert not scene.ranks.lost_at, "the process that has the name now is not lost"
