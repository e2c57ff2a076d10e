"""Periodic equals synchronous: the gradient that AdamW sees, after the division and the clipping."""

import copy
import random

import pytest
import torch

from polyrhythm.config import load_config
from polyrhythm.loader import LoaderSettings, RolloutLoader
from polyrhythm.training.parallel.replicate import WholeReplica
from polyrhythm.training.trainer import Trainer
from polyrhythm.types import MicroBatch
from tests.conftest import ScriptedSource, build_tiny_model, make_group

NUM_GROUPS = 12


def config_for(**flags):
    training = {"tokens_per_micro_batch": 100_000, "max_grad_norm": 1e9} | flags.pop("training", {})
    rollout = {"group_size": 4, "groups_per_step": NUM_GROUPS, "max_tokens": 9}
    return load_config([], {"num_steps": 1, "rollout": rollout, "training": training, **flags})


def gradients_of(
    policy, config, arrivals, trainer_class=Trainer, replica: WholeReplica | None = None
) -> tuple[list[torch.Tensor], Trainer]:
    """One step through loader and trainer; the gradients of every update as AdamW receives them."""
    trainer = trainer_class(config, copy.deepcopy(policy), replica=replica)
    source = ScriptedSource(arrivals) if isinstance(arrivals, list) else arrivals
    seen: list[torch.Tensor] = []
    update = trainer.optimizer.inner.step

    def record_and_update():
        seen.append(torch.cat([p.grad.flatten().clone() for p in trainer.optimizer.parameters]))
        update()

    trainer.optimizer.inner.step = record_and_update
    settings = LoaderSettings.of(config, share_prompt=trainer.models.shares_prompts)
    for step in RolloutLoader(source, settings).steps():
        trainer.begin_step(step.version)
        for micro_batches in step.updates():
            for micro_batch in micro_batches:
                trainer.forward_backward(micro_batch)
            trainer.optim_step()
    return seen, trainer


def relative_error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    assert len(ours) == len(theirs) > 0
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def random_arrivals(groups, seed: int):
    """A random order, cut into random arrivals."""
    draw = random.Random(seed)
    shuffled = draw.sample(groups, len(groups))
    arrivals = []
    while shuffled:
        size = draw.randint(1, 4)
        arrivals.append(shuffled[:size])
        shuffled = shuffled[size:]
    return arrivals


class MeanOfMeansTrainer(Trainer):
    """The classic mistake: each micro-batch divided by its own tokens, and the mean of those taken."""

    def forward_backward(self, micro_batch: MicroBatch) -> None:
        before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.optimizer.parameters]
        divisor = self.divisor
        super().forward_backward(micro_batch)
        own = self.divisor - divisor
        for parameter, earlier in zip(self.optimizer.parameters, before, strict=True):
            parameter.grad = earlier + ((parameter.grad - earlier) / own if parameter.grad is not None else 0.0)
        self.divisor = divisor + 1


@pytest.mark.parametrize("max_grad_norm", [1e9, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant", "group_token_mean"])
def test_any_arrival_order_and_any_split_give_the_synchronous_gradient(tiny_policy, aggregation, max_grad_norm):
    groups = [make_group(position) for position in range(NUM_GROUPS)]
    algorithm = {"aggregation": aggregation}
    sync = config_for(schedule="sync", algorithm=algorithm, training={"max_grad_norm": max_grad_norm})
    expected, _ = gradients_of(tiny_policy, sync, [groups])
    for seed, budget in enumerate((1, 120, 100_000)):
        training = {"max_grad_norm": max_grad_norm, "tokens_per_micro_batch": budget}
        periodic = config_for(schedule="periodic", algorithm=algorithm, training=training)
        streamed, _ = gradients_of(tiny_policy, periodic, random_arrivals(groups, seed))
        assert relative_error(streamed, expected) < 1e-6
    clipped_norm = float(expected[0].norm())
    assert clipped_norm == pytest.approx(0.05, rel=1e-3) if max_grad_norm == 0.05 else clipped_norm > 0.05


@pytest.mark.parametrize("max_grad_norm", [1e9, 0.05], ids=["unclipped", "clipped"])
def test_a_mean_of_micro_batch_means_would_be_caught(tiny_policy, max_grad_norm):
    groups = [make_group(position) for position in range(NUM_GROUPS)]
    training = {"max_grad_norm": max_grad_norm, "tokens_per_micro_batch": 120}
    expected, _ = gradients_of(tiny_policy, config_for(schedule="sync", training=training), [groups])
    wrong, _ = gradients_of(tiny_policy, config_for(training=training), random_arrivals(groups, 0), MeanOfMeansTrainer)
    assert relative_error(wrong, expected) > 1e-2


def test_problem_order_gives_the_same_bits_however_groups_arrive(tiny_policy):
    groups = [make_group(position) for position in range(NUM_GROUPS)]
    config = {"order": "problem", "training": {"tokens_per_micro_batch": 120, "max_grad_norm": 0.05}}
    expected, _ = gradients_of(tiny_policy, config_for(schedule="sync", **config), [groups])
    for sizes in ((1,) * NUM_GROUPS, (5, 1, 6), (2, 2, 2, 2, 2, 2)):
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        arrivals = [groups[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        streamed, _ = gradients_of(tiny_policy, config_for(schedule="periodic", **config), arrivals)
        assert all(torch.equal(a, b) for a, b in zip(streamed, expected, strict=True))


def test_several_updates_agree_with_the_synchronous_run_in_the_same_arrival_order(tiny_policy):
    groups = [make_group(position) for position in range(NUM_GROUPS)]
    shuffled = [group for arrival in random_arrivals(groups, 3) for group in arrival]
    training = {"updates_per_step": 4, "learning_rate": 1e-2, "max_grad_norm": 0.05}
    algorithm = {"clip_low": 0.05, "clip_high": 0.05}
    expected, sync = gradients_of(
        tiny_policy, config_for(schedule="sync", algorithm=algorithm, training=training), [shuffled]
    )
    budget = training | {"tokens_per_micro_batch": 60}
    streamed, periodic = gradients_of(
        tiny_policy, config_for(schedule="periodic", algorithm=algorithm, training=budget), [[g] for g in shuffled]
    )
    assert len(expected) == 4
    assert relative_error(streamed[:1], expected[:1]) < 1e-6
    assert relative_error(streamed, expected) < 1e-4  # AdamW turns rounding in tiny gradients into rounding of weights
    assert sync.metrics()["train/clip_fraction"] > 0, "the test must exercise the clipped ratio"
    assert periodic.metrics()["train/clip_fraction"] == sync.metrics()["train/clip_fraction"]


def test_one_update_keeps_the_ratio_at_exactly_one_and_a_fresh_reference_the_kl_at_exactly_zero(tiny_policy):
    groups = [make_group(position) for position in range(NUM_GROUPS)]
    for estimator in ("k1", "k2", "k3"):
        config = config_for(algorithm={"kl_coef": 0.1, "kl_estimator": estimator})
        _, trainer = gradients_of(tiny_policy, config, random_arrivals(groups, 1))
        metrics = trainer.metrics()
        assert metrics["train/ratio_abs_gap_max"] == 0.0
        assert metrics["train/clip_fraction"] == 0.0
        assert metrics["kl/k1"] == 0.0 and metrics["kl/k3"] == 0.0


def test_groups_without_variance_cost_no_forward_pass_but_count_in_the_divisor(tiny_policy):
    groups = [make_group(position) for position in range(NUM_GROUPS)]
    flat = [group for group in groups if len({rollout.reward for rollout in group.rollouts}) == 1]
    assert flat, "the script must hold such groups"
    trainer = Trainer(config_for(), copy.deepcopy(tiny_policy))
    trainer.begin_step(0)
    trainer.models.score = None  # a forward pass would fail
    trainer.forward_backward(MicroBatch(version=0, groups=flat, advantages=[[0.0] * 4 for _ in flat]))
    assert trainer.metrics()["groups/skipped"] == len(flat)
    assert trainer.divisor == sum(group.num_sampled for group in flat)


def test_a_group_from_an_older_policy_is_refused():
    from polyrhythm.errors import RunError

    trainer = Trainer(config_for(), build_tiny_model("llama"))
    trainer.begin_step(1)
    stale = make_group(0, step=1, version=0)
    with pytest.raises(RunError, match="v0 while v1 is trained"):
        trainer.forward_backward(MicroBatch(version=1, groups=[stale], advantages=[[1.0, -1.0, 0.0, 0.0]]))
