"""One cost of a group for the cut, the hand-out and the row: what the loader calls a micro-batch is one pass of the trainer."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.algorithms.advantages import ADVANTAGES
from polyrhythm.algorithms.cost import CostModel
from polyrhythm.loader.micro_batches import ReadyGroups
from polyrhythm.training.packing.layout import Layout, pack
from polyrhythm.types import Group, MicroBatch, Turn
from tests.conftest import make_group


def make_groups(seed: int, num: int = 8) -> list[Group]:
    """Some groups without variance, some rewards that failed, some traces with given tokens."""
    draw = random.Random(seed)
    groups = []
    for position in range(num):
        group = make_group(position, seed=seed)
        rollouts = []
        for rollout in group.rollouts:
            if draw.random() < 0.2:
                rollout = msgspec.structs.replace(rollout, reward=None)
            if draw.random() < 0.3:
                turns = [*rollout.trace.turns, Turn([5] * draw.randint(1, 4), [6], [-1.0], "stop")]
                rollout = msgspec.structs.replace(rollout, trace=msgspec.structs.replace(rollout.trace, turns=turns))
            rollouts.append(rollout)
        groups.append(msgspec.structs.replace(group, rollouts=rollouts))
    return groups


def cut(groups: list[Group], cost: CostModel, budget: int) -> list[MicroBatch]:
    ready = ReadyGroups(cost, budget, "group_std")
    for group in groups:
        ready.add(group)
    batches = []
    while ready:
        batches += ready.take(version=0)
    return batches


def rows_of(micro_batch: MicroBatch, cost: CostModel, budget: int) -> list[Layout]:
    """The rows that the trainer makes of a micro-batch."""
    kept = [
        (group.prompt_ids, [rollout.trace.token_ids for rollout in group.rollouts])
        for group, advantages in zip(micro_batch.groups, micro_batch.advantages, strict=True)
        if any(advantages) or (cost.has_kl and group.rollouts)
    ]
    return pack(kept, share_prompt=cost.share_prompt, max_tokens=budget)


@given(st.integers(0, 1000), st.booleans(), st.booleans(), st.integers(20, 200))
def test_a_micro_batch_is_one_row_unless_a_single_group_is_longer_than_the_budget(seed, share_prompt, has_kl, budget):
    groups, cost = make_groups(seed), CostModel(share_prompt=share_prompt, has_kl=has_kl)
    batches = cut(groups, cost, budget)
    assert [group.position for batch in batches for group in batch.groups] == list(range(8)), "each once, in order"
    for batch in batches:
        rows = rows_of(batch, cost, budget)
        costs = [cost(group) for group in batch.groups]
        if sum(costs) <= budget:
            assert len(rows) == (1 if sum(costs) else 0)
            assert sum(row.num_tokens for row in rows) == sum(costs)
        else:
            assert len([price for price in costs if price]) == 1, "only a group that is too long by itself goes beyond"


@given(st.integers(0, 1000), st.sampled_from(sorted(ADVANTAGES)))
def test_what_costs_nothing_is_what_has_no_advantage(seed, advantage):
    cost = CostModel(share_prompt=True, has_kl=False)
    for group in make_groups(seed):
        rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
        assert (cost(group) > 0) == any(ADVANTAGES[advantage](rewards))


@pytest.mark.parametrize("share_prompt", [True, False])
def test_a_model_that_cannot_share_prompts_is_given_what_fills_one_row_and_no_more(share_prompt):
    """Whatever the configuration hopes for: the cut follows what the model does."""
    groups = [make_group(position) for position in (0, 1, 2, 4, 5)]  # all with reward variance
    cost = CostModel(share_prompt=share_prompt, has_kl=False)
    budget = cost(groups[0]) + cost(groups[1])
    first, *_ = cut(groups, cost, budget)
    assert [group.position for group in first.groups] == [0, 1]
    assert len(rows_of(first, cost, budget)) == 1


def test_a_rollout_whose_reward_failed_takes_no_room():
    group = make_group(0)
    failed = msgspec.structs.replace(group.rollouts[0], reward=None)
    smaller = msgspec.structs.replace(group, rollouts=[failed, *group.rollouts[1:]])
    cost = CostModel(share_prompt=True, has_kl=True)
    assert cost(group) - cost(smaller) == failed.trace.num_tokens - 1
    nothing_left = [msgspec.structs.replace(rollout, reward=None) for rollout in group.rollouts]
    assert cost(msgspec.structs.replace(group, rollouts=nothing_left)) == 0
