"""Every group of a step reaches exactly one rank, whoever asks, how often and when."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.algorithms.cost import CostModel
from polyrhythm.conductor.steps import assignment
from polyrhythm.conductor.steps.assignment import GroupAssignment
from polyrhythm.types import Group
from tests.conftest import make_group

GROUPS = [make_group(position) for position in range(13)]


def size_of(group: Group) -> int:
    return len(group.prompt_ids) + group.num_sampled


def deal_all(num_ranks: int, in_turn: bool, num_updates: int, draw: random.Random) -> list[list[int]]:
    """A step of 12 groups that arrive and are asked for in random turns; answers are lost now and then."""
    dealt = GroupAssignment(range(num_ranks), draw.choice([1, 60, 10_000]), size_of, in_turn=in_turn)
    received: list[list[int]] = [[] for _ in range(num_ranks)]
    num_ready = 0
    for until in range(12 // num_updates, 13, 12 // num_updates):
        unfinished = set(range(num_ranks))
        while unfinished:
            num_ready = min(12, num_ready + draw.randint(0, 2))
            rank = draw.choice(sorted(unfinished))
            groups, is_last = dealt.share(GROUPS[:num_ready], rank, len(received[rank]), until)
            if draw.random() < 0.3:
                continue  # the answer did not arrive: the rank asks again
            received[rank] += [group.position for group in groups]
            if is_last:
                unfinished.discard(rank)
        assert sorted(position for mine in received for position in mine) == list(range(until))
        assert dealt.num_taken == until
    return received


@given(st.integers(1, 5), st.booleans(), st.sampled_from([1, 2, 3, 4]), st.integers(0, 10_000))
def test_every_group_reaches_exactly_one_rank_in_order(num_ranks, in_turn, num_updates, seed):
    received = deal_all(num_ranks, in_turn, num_updates, random.Random(seed))
    assert all(mine == sorted(mine) for mine in received)


@pytest.mark.parametrize("seed", range(5))
def test_in_turn_the_deal_does_not_depend_on_who_asks_when(seed):
    assert deal_all(3, True, 2, random.Random(seed)) == [list(range(rank, 12, 3)) for rank in range(3)]


def test_by_demand_the_rank_that_asks_gets_its_part_and_the_faster_one_gets_more():
    dealt = GroupAssignment(range(2), 10_000, size_of, in_turn=False)
    first, _ = dealt.share(GROUPS[:4], rank=0, offset=0, until=12)
    assert [group.position for group in first] == [0, 1], "the other rank is hungry too"
    second, _ = dealt.share(GROUPS[:12], rank=0, offset=2, until=12)
    assert [group.position for group in second] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("first", ["slow", "fast"])
def test_a_slow_rank_that_asks_first_does_not_keep_what_a_fast_one_could_train_on(first):
    """Three times slower, and 12 groups at once: whoever begins, it gets a quarter of them."""
    one_group = max(map(size_of, GROUPS))
    dealt = GroupAssignment(range(2), one_group, size_of, in_turn=False)
    seconds, ranks = {"slow": 3, "fast": 1}, {"slow": 0, "fast": 1}
    free_at, num = {name: 0 if name == first else 0.1 for name in seconds}, {"slow": 0, "fast": 0}
    while free_at:
        name = min(free_at, key=free_at.__getitem__)
        groups, is_last = dealt.share(GROUPS[:12], ranks[name], num[name], until=12)
        num[name] += len(groups)
        free_at[name] += seconds[name] * len(groups)
        if is_last:
            del free_at[name]
    assert num == {"slow": 3, "fast": 9}


def test_the_last_answer_says_so_and_not_the_one_before(monkeypatch):
    monkeypatch.setattr(assignment, "MAX_TOKENS_PER_REPLY", 1)
    dealt = GroupAssignment(range(1), 1, size_of, in_turn=False)
    answers = [dealt.share(GROUPS[:3], 0, offset, until=3) for offset in range(4)]
    assert [([group.position for group in groups], is_last) for groups, is_last in answers] == [
        ([0], False), ([1], False), ([2], True), ([], True),
    ]  # fmt: skip


def test_groups_that_cost_no_pass_do_not_fill_a_share():
    cost = CostModel(share_prompt=True, has_kl=False)
    flat, *others = [GROUPS[3], GROUPS[0], GROUPS[1], GROUPS[2]]
    assert cost(flat) == 0 and all(map(cost, others))
    dealt = GroupAssignment(range(2), cost(others[0]), cost, in_turn=False)
    share, _ = dealt.share([flat, *others], rank=0, offset=0, until=4)
    assert [group.position for group in share] == [3, 0], "what costs nothing, and one micro-batch"
