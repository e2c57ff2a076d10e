"""What the training loop sees: when micro-batches are formed, of what, and in which order."""

import msgspec
import pytest

from polyrhythm.config import load_config
from polyrhythm.errors import RunError
from polyrhythm.loader import LoaderSettings, RolloutLoader
from tests.conftest import ScriptedSource, make_group


def config_for(num_groups: int, **flags):
    rollout = {"group_size": 4, "groups_per_step": num_groups, "max_tokens": 9}
    return load_config([], {"num_steps": 1, "rollout": rollout, **flags})


def test_a_larger_model_may_take_longer_to_reach_the_engines():
    config = config_for(4, weights={"load_deadline_s": 5.0})
    small, large = (LoaderSettings.of(config, share_prompt=True, snapshot_bytes=size) for size in (0, 14 * 10**9))
    assert large.load_deadline_s == pytest.approx(small.load_deadline_s + 280)


def run_step(source: ScriptedSource, config) -> list[list[int]]:
    """Positions of the groups of each micro-batch; training is an event of the source's script."""
    batches = []
    for step in RolloutLoader(source, LoaderSettings.of(config, share_prompt=True)).steps():
        for update in step.updates():
            for micro_batch in update:
                positions = [group.position for group in micro_batch.groups]
                source.events.append(f"train {positions}")
                batches.append(positions)
        step.commit({})
    return batches


def test_training_starts_before_the_last_group_is_finished():
    source = ScriptedSource([[make_group(position)] for position in (2, 0, 1)])
    run_step(source, config_for(3))
    assert source.events == [
        "engines hold 0", "finished 2", "train [2]", "finished 0", "train [0]", "finished 1", "train [1]", "published 1",
    ]  # fmt: skip


def test_an_idle_trainer_takes_what_is_ready_and_a_full_budget_makes_a_micro_batch():
    groups = [make_group(position) for position in (0, 1, 2, 4, 5)]  # all with reward variance
    cost = [len(group.prompt_ids) + group.num_sampled - len(group.rollouts) for group in groups]
    budget = cost[0] + cost[1]
    source = ScriptedSource([groups[:3], groups[3:]])
    batches = run_step(source, config_for(5, training={"tokens_per_micro_batch": budget}))
    assert batches[0] == [0, 1]
    assert batches[1] == [2]
    assert sorted(position for batch in batches for position in batch) == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("arrivals", [(1,) * 8, (3, 5), (8,)])
def test_problem_order_cuts_micro_batches_by_content_and_not_by_timing(arrivals):
    groups = [make_group(position) for position in range(8)]
    starts = [sum(arrivals[:i]) for i in range(len(arrivals))]
    script = [groups[start : start + size] for start, size in zip(starts, arrivals, strict=True)]
    config = config_for(8, order="problem", training={"tokens_per_micro_batch": 60})
    expected = run_step(ScriptedSource([groups]), config_for(8, schedule="sync", order="problem",
                                                            training={"tokens_per_micro_batch": 60}))  # fmt: skip
    assert len(expected) > 2
    assert run_step(ScriptedSource(script), config) == expected


def test_a_rollout_without_reward_takes_no_part_in_the_group():
    group = make_group(0)
    rollouts = [
        msgspec.structs.replace(r, reward=x) for r, x in zip(group.rollouts, [1.0, None, 0.0, None], strict=True)
    ]
    source = ScriptedSource([[msgspec.structs.replace(group, rollouts=rollouts)]])
    for step in RolloutLoader(source, LoaderSettings.of(config_for(1), share_prompt=True)).steps():
        for update in step.updates():
            for micro_batch in update:
                assert [rollout.index for rollout in micro_batch.groups[0].rollouts] == [0, 2]
                first, second = micro_batch.advantages[0]
                assert first == -second > 0


class TwoShards:
    """`Shards` in one process: what the leader deals is kept for the other, rounds and their end."""

    num_shards = 2
    has_updated = True

    def __init__(self, *, is_leader: bool, rounds: list):
        self.is_leader = is_leader
        self.rounds = rounds

    def meet(self) -> None: ...

    def deal(self, round):
        if self.is_leader:
            self.rounds.append(list(round))
            return round[0] if round else None
        dealt = self.rounds.pop(0)
        return dealt[1] if dealt else None


def seen_by(shards: TwoShards, source: ScriptedSource, **flags) -> list:
    config = config_for(8, training={"tokens_per_micro_batch": 60}, **flags)
    steps = RolloutLoader(source, LoaderSettings.of(config, share_prompt=True), shards=shards).steps()
    return [micro_batch for step in steps for update in step.updates() for micro_batch in update]


@pytest.mark.parametrize("order", ["completion", "problem"])
def test_the_shards_of_a_replica_train_on_different_groups_in_the_same_number_of_rounds(order):
    rounds: list = []
    groups = [make_group(position) for position in range(8)]
    first = seen_by(TwoShards(is_leader=True, rounds=rounds), ScriptedSource([groups[:3], groups[3:]]), order=order)
    silent = ScriptedSource([])
    second = seen_by(TwoShards(is_leader=False, rounds=rounds), silent, order=order)
    assert silent.events == [], "the leader alone asks"
    assert len(first) == len(second) > 1 and rounds == []
    dealt = [group.position for micro_batch in (*first, *second) for group in micro_batch.groups]
    assert sorted(dealt) == list(range(8)), "each once"
    assert all(micro_batch.groups for micro_batch in second[:-1]), "both have something to do while there is enough"


def test_rounds_in_problem_order_are_cut_by_content_and_not_by_arrival():
    groups = [make_group(position) for position in range(8)]
    by_arrival = []
    for sizes in ((8,), (1,) * 8, (3, 5)):
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        arrivals = [groups[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        rounds: list = []
        seen_by(TwoShards(is_leader=True, rounds=rounds), ScriptedSource(arrivals), order="problem")
        by_arrival.append([[[g.position for g in part.groups] for part in dealt] for dealt in rounds])
    assert by_arrival[0] == by_arrival[1] == by_arrival[2]


def test_a_group_of_another_step_is_refused():
    class WrongStep(ScriptedSource):
        def groups(self, version, offset, until, wait_s):
            reply = super().groups(version, offset, until, wait_s)
            return msgspec.structs.replace(reply, groups=[msgspec.structs.replace(g, step=7) for g in reply.groups])

    with pytest.raises(RunError, match="a group of step 7 during step 0"):
        run_step(WrongStep([[make_group(0)]]), config_for(1))
