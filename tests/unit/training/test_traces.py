"""Rollouts of several turns: what was given is attended to and never trained on, and nothing counts it."""

import copy
import random

import pytest
import torch

from polyrhythm.algorithms.advantages import ADVANTAGES
from polyrhythm.algorithms.kl import kl_k3
from polyrhythm.training.trainer import Trainer
from polyrhythm.types import Group, MicroBatch, Rollout, Trace, Turn
from tests.conftest import VOCABULARY, build_tiny_model
from tests.contracts.test_losses import sequence_ratios
from tests.unit.training.test_equivalence import config_for

MAX_TOKENS = 9
KL_COEF = 0.2


def make_group(position: int) -> Group:
    """Four rollouts of one to three turns; some are given something before their first token."""
    draw = random.Random(position)
    rollouts = []
    for index in range(4):
        turns = []
        for number in range(1 + (index + position) % 3):
            num_given = draw.randint(0 if number == 0 else 1, 4)
            ids = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 3))]
            given = [draw.randrange(VOCABULARY) for _ in range(num_given)]
            turns.append(Turn(given, ids, [-draw.random() for _ in ids], "stop"))
        rollouts.append(Rollout(index, Trace(turns), 0, reward=float(index % 2) + 0.1 * draw.random()))
    prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(2, 12))]
    return Group(step=0, position=position, problem_index=position, prompt_ids=prompt, rollouts=rollouts)


GROUPS = [make_group(position) for position in range(5)]


def micro_batch(groups: list[Group]) -> MicroBatch:
    rewards = [[rollout.reward or 0.0 for rollout in group.rollouts] for group in groups]
    return MicroBatch(version=0, groups=groups, advantages=[ADVANTAGES["group_std"](row) for row in rewards])


def logprobs_after(model, group: Group, rollout: Rollout) -> torch.Tensor:
    """Of every token after the prompt, by transformers' own forward pass over this sequence alone."""
    ids = torch.tensor([[*group.prompt_ids, *rollout.trace.token_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(group.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, len(group.prompt_ids) :, None])[:, 0]


def plain_gradients(policy, groups: list[Group], aggregation: str, max_grad_norm: float) -> dict[str, torch.Tensor]:
    """One sequence at a time with an explicit mask, divided and clipped as the documentation says."""
    model = copy.deepcopy(policy).double()
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.01)
    total = torch.zeros((), dtype=torch.float64)
    for group, advantages in zip(groups, micro_batch(groups).advantages, strict=True):
        masks = [torch.tensor(rollout.trace.sampled_mask, dtype=torch.float64) for rollout in group.rollouts]
        num_in_group = sum(float(mask.sum()) for mask in masks)
        for rollout, mask, advantage in zip(group.rollouts, masks, advantages, strict=True):
            logprobs = logprobs_after(model, group, rollout)
            losses = -advantage * torch.exp(logprobs - logprobs.detach())
            losses = losses + KL_COEF * kl_k3(logprobs, logprobs_after(reference, group, rollout).detach())
            weight = {
                "token_mean": 1.0,
                "sequence_mean": 1.0 / float(mask.sum()),
                "constant": 1.0 / MAX_TOKENS,
                "group_token_mean": 1.0 / num_in_group,
            }[aggregation]
            total = total + weight * (losses * mask).sum()
    num_rollouts = sum(len(group.rollouts) for group in groups)
    divisor = {
        "token_mean": sum(sum(rollout.trace.sampled_mask) for group in groups for rollout in group.rollouts),
        "sequence_mean": num_rollouts,
        "constant": num_rollouts,
        "group_token_mean": len(groups),
    }[aggregation]
    (total / divisor).backward()
    norm = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    assert norm > max_grad_norm or max_grad_norm > 1e3, "the test must exercise the clipping"
    scale = min(1.0, max_grad_norm / (norm + 1e-6))
    return {name: parameter.grad * scale for name, parameter in model.named_parameters()}


def trained_gradients(policy, batches: list[list[Group]], share: str, aggregation: str, max_grad_norm: float):
    config = config_for(
        algorithm={"aggregation": aggregation, "kl_coef": KL_COEF},
        training={"max_grad_norm": max_grad_norm, "share_prompt": share, "tokens_per_micro_batch": 60},
    )
    trainer = Trainer(config, copy.deepcopy(policy))
    with torch.no_grad():
        for parameter in trainer.models.reference.parameters():
            parameter.add_(0.01)
    seen: dict[str, torch.Tensor] = {}
    trainer.optimizer.inner.step = lambda: seen.update(
        (name, parameter.grad.clone()) for name, parameter in trainer.policy.named_parameters()
    )
    trainer.begin_step(0)
    for groups in batches:
        trainer.forward_backward(micro_batch(groups))
    trainer.optim_step()
    return seen, trainer


@pytest.mark.parametrize("share", ["always", "never"])
@pytest.mark.parametrize("max_grad_norm", [1e9, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant", "group_token_mean"])
def test_gradients_are_those_of_single_sequences_with_a_mask(tiny_policy, aggregation, max_grad_norm, share):
    expected = plain_gradients(tiny_policy, GROUPS, aggregation, max_grad_norm)
    for batches in ([GROUPS], [GROUPS[3:], GROUPS[:1], GROUPS[1:3]]):
        seen, _ = trained_gradients(tiny_policy, batches, share, aggregation, max_grad_norm)
        assert seen.keys() == expected.keys()
        for name, gradient in seen.items():
            error = float((gradient.double() - expected[name]).norm() / expected[name].norm())
            assert error < 1e-5, f"{name} is {error:.1e} off"


def test_what_was_given_is_read_but_is_no_target():
    policy = build_tiny_model("llama")
    group = GROUPS[2]
    expected, _ = trained_gradients(policy, [[group]], "always", "token_mean", 1e9)
    place, rollout = next((i, r) for i, r in enumerate(group.rollouts) if len(r.trace.turns) > 1)
    first, second, *rest = rollout.trace.turns
    other = Turn([(second.given_ids[0] + 1) % VOCABULARY, *second.given_ids[1:]], *list_of(second)[1:])
    rollouts = list(group.rollouts)
    rollouts[place] = Rollout(rollout.index, Trace([first, other, *rest]), 0, rollout.reward)
    changed = Group(0, group.position, group.position, group.prompt_ids, rollouts)
    seen, trainer = trained_gradients(policy, [[changed]], "always", "token_mean", 1e9)
    assert not torch.equal(seen["model.layers.0.mlp.up_proj.weight"], expected["model.layers.0.mlp.up_proj.weight"])
    assert trainer.metrics()["train/tokens"] == group.num_sampled < sum(r.trace.num_tokens for r in group.rollouts)


def list_of(turn: Turn) -> list:
    return [turn.given_ids, turn.token_ids, turn.rollout_logprobs, turn.finish_reason]


def test_a_loss_over_whole_sequences_needs_nothing_but_its_function():
    """Cut into rows of any size, a sequence ratio is that of the whole rollout."""
    policy = build_tiny_model("qwen3")
    updates = {"updates_per_step": 2, "learning_rate": 1e-2, "max_grad_norm": 1e9}
    seen = []
    for budget in (1, 50, 100_000):
        config = config_for(
            algorithm={
                "loss": "tests.contracts.test_losses:sequence_ratios",
                "aggregation": "sequence_mean",
                "clip_low": 0.05,
                "clip_high": 0.05,
            },
            training=updates | {"tokens_per_micro_batch": budget},
        )
        trainer = Trainer(config, copy.deepcopy(policy))
        assert trainer.loss is sequence_ratios
        trainer.begin_step(0)
        trainer.forward_backward(micro_batch(GROUPS[:2]))
        trainer.optim_step()
        trainer.forward_backward(micro_batch(GROUPS[2:]))
        seen.append(torch.cat([gradient.flatten().clone() for gradient in trainer.optimizer.gradients()]))
        assert trainer.metrics()["train/ratio_abs_gap_max"] > 0.05, "the test must exercise the clipping"
        assert trainer.metrics()["loss/sequence_ratio"] != 1.0
    for gradients in seen[1:]:
        assert float((gradients - seen[0]).norm() / seen[0].norm()) < 1e-4


def test_the_mismatch_is_between_the_engine_and_the_weights_that_generated():
    """With a second update the policy has moved on; what engine and trainer make of the old weights has not."""
    policy = build_tiny_model("llama")
    exact = []
    with torch.no_grad():
        for group in GROUPS:
            rollouts = []
            for rollout in group.rollouts:
                (ids,) = [rollout.trace.token_ids]
                one_turn = Trace([Turn([], ids, [0.0] * len(ids), "stop")])
                logprobs = logprobs_after(policy, group, Rollout(rollout.index, one_turn, 0))
                trace = Trace([Turn([], ids, logprobs.tolist(), "stop")])
                rollouts.append(Rollout(rollout.index, trace, 0, rollout.reward))
            exact.append(Group(0, group.position, group.position, group.prompt_ids, rollouts))
    config = config_for(training={"updates_per_step": 2, "learning_rate": 1e-2})
    trainer = Trainer(config, copy.deepcopy(policy))
    trainer.begin_step(0)
    for groups in (exact[:2], exact[2:]):
        trainer.forward_backward(micro_batch(groups))
        trainer.optim_step()
    metrics = trainer.metrics()
    assert metrics["train/ratio_abs_gap_max"] > 0.01, "the policy must have moved"
    assert metrics["mismatch/logprob_abs_max"] < 1e-4
    assert abs(metrics["mismatch/k1"]) < 1e-5 and metrics["mismatch/k3"] < 1e-8
