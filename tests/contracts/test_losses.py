"""Every loss is a sum over sequences: how they are divided among calls, and in which order they come, changes nothing."""

import random

import pytest
import torch
from torch import Tensor

from polyrhythm.algorithms.loss import Loss, LossInputs, LossOutputs
from polyrhythm.algorithms.losses import LOSSES, find_loss
from polyrhythm.config import AlgorithmConfig

LENGTHS = [3, 1, 7, 2, 5, 4]
CONFIGS = {
    "no kl": AlgorithmConfig(clip_low=0.1, clip_high=0.1),
    "kl": AlgorithmConfig(clip_low=0.1, clip_high=0.1, kl_coef=0.3, kl_estimator="k3"),
}


def sequence_ratios(inputs: LossInputs, config: AlgorithmConfig) -> LossOutputs:
    """One ratio per sequence, the geometric mean over its tokens, clipped as a whole (GSPO): nothing else has to know."""
    sequence_N = inputs.sequence_N
    lengths_S = torch.bincount(sequence_N)
    sums_S = torch.zeros(len(lengths_S), dtype=inputs.policy_logprobs_N.dtype)
    sums_S = sums_S.index_add(0, sequence_N, inputs.policy_logprobs_N - inputs.old_logprobs_N)
    ratio_N = torch.exp(sums_S / lengths_S)[sequence_N]
    clamped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    losses_N = -torch.minimum(ratio_N * inputs.advantages_N, clamped_N * inputs.advantages_N)
    return LossOutputs((losses_N * inputs.weights_N).sum(), {"loss/sequence_ratio": ratio_N.detach().sum()})


def mean_over_the_call(inputs: LossInputs, config: AlgorithmConfig) -> LossOutputs:
    """The classic mistake."""
    outputs = find_loss("clipped")(inputs, config)
    return LossOutputs(outputs.loss / len(inputs.sequence_N), outputs.sums)


KINDS: dict[str, Loss] = {name: find_loss(name) for name in LOSSES} | {"sequence ratios": sequence_ratios}


def make_inputs(config: AlgorithmConfig, advantage: float = 1.0) -> LossInputs:
    """Sequences whose ratios lie on both sides of the clipping, in fp64."""
    torch.manual_seed(0)
    num = sum(LENGTHS)
    sequence_N = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    old_N = -torch.rand(num, dtype=torch.float64) * 3
    policy_N = old_N + 0.3 * torch.randn(num, dtype=torch.float64)
    advantages_S = advantage * torch.randn(len(LENGTHS), dtype=torch.float64)
    weights_S = 1.0 / torch.tensor(LENGTHS, dtype=torch.float64)
    return LossInputs(
        policy_logprobs_N=policy_N,
        old_logprobs_N=old_N,
        reference_logprobs_N=old_N + 0.1 * torch.randn(num, dtype=torch.float64) if config.kl_coef else None,
        rollout_logprobs_N=old_N + 1e-6,
        advantages_N=advantages_S[sequence_N],
        weights_N=weights_S[sequence_N],
        sequence_N=sequence_N,
    )


def only(inputs: LossInputs, sequences: list[int]) -> tuple[LossInputs, Tensor]:
    """These sequences in this order, counted from 0 as in a row of their own, and where their tokens were."""
    places = torch.cat([torch.nonzero(inputs.sequence_N == sequence)[:, 0] for sequence in sequences])
    lengths = torch.tensor([LENGTHS[sequence] for sequence in sequences])
    taken = LossInputs(*(None if values is None else values[places] for values in inputs))
    return taken._replace(sequence_N=torch.repeat_interleave(torch.arange(len(sequences)), lengths)), places


def added_up(loss: Loss, config: AlgorithmConfig, inputs: LossInputs, cut: list[list[int]]):
    """Loss, other sums and gradient over calls with these sequences."""
    total, sums, gradient_N = 0.0, {}, torch.zeros_like(inputs.policy_logprobs_N)
    for sequences in cut:
        taken, places = only(inputs, sequences)
        policy_N = taken.policy_logprobs_N.clone().requires_grad_()
        outputs = loss(taken._replace(policy_logprobs_N=policy_N), config)
        outputs.loss.backward()
        assert policy_N.grad is not None
        gradient_N[places] += policy_N.grad
        total += float(outputs.loss.detach())
        for name, value in outputs.sums.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return total, sums, gradient_N


def random_cut(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    order = draw.sample(range(len(LENGTHS)), len(LENGTHS))
    cut = []
    while order:
        size = draw.randint(1, 3)
        cut.append(order[:size])
        order = order[size:]
    return cut


def differs(loss: Loss, config: AlgorithmConfig) -> bool:
    inputs = make_inputs(config)
    expected, expected_sums, expected_N = added_up(loss, config, inputs, [list(range(len(LENGTHS)))])
    for seed in range(5):
        total, sums, gradient_N = added_up(loss, config, inputs, random_cut(seed))
        if abs(total - expected) > 1e-12 or not torch.allclose(gradient_N, expected_N, atol=1e-13, rtol=0):
            return True
        if any(abs(sums[name] - value) > 1e-12 for name, value in expected_sums.items()):
            return True
    return False


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_is_a_sum_whatever_the_split_and_the_order(kind, config):
    assert not differs(KINDS[kind], CONFIGS[config])


def test_a_mean_over_the_call_would_be_caught():
    assert differs(mean_over_the_call, CONFIGS["no kl"])


@pytest.mark.parametrize("kind", KINDS)
def test_without_advantages_and_kl_there_is_no_gradient(kind):
    """The trainer relies on it: a group whose rewards are all equal costs no forward pass."""
    config = CONFIGS["no kl"]
    _, _, gradient_N = added_up(KINDS[kind], config, make_inputs(config, advantage=0.0), [list(range(len(LENGTHS)))])
    assert not gradient_N.any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_a_loss_follows_its_advantages(kind):
    config = CONFIGS["no kl"]
    inputs = make_inputs(config)
    inputs = inputs._replace(policy_logprobs_N=inputs.old_logprobs_N)
    _, _, gradient_N = added_up(KINDS[kind], config, inputs, [list(range(len(LENGTHS)))])
    # On-policy every surrogate of the ratio has the same gradient, up to how it is spread over a sequence.
    assert torch.allclose(gradient_N, -inputs.advantages_N * inputs.weights_N)
