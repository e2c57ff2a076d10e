import pytest
import torch

from polyrhythm.algorithms.aggregation import group_divisor, token_weight
from polyrhythm.algorithms.kl import kl_k1, kl_k2, kl_k3
from polyrhythm.algorithms.loss import LossInputs, LossOutputs
from polyrhythm.algorithms.losses import check_loss, find_loss
from polyrhythm.algorithms.losses.clipped import clipped
from polyrhythm.config import AlgorithmConfig
from polyrhythm.errors import UserError

LENGTHS = [[3, 5], [2, 8]]
MAX_TOKENS = 10


def clipped_loss(logprobs: torch.Tensor, old: torch.Tensor, advantages: list[float]) -> LossOutputs:
    count = len(advantages)
    inputs = LossInputs(
        logprobs, old, None, old, torch.tensor(advantages), torch.ones(count), torch.zeros(count, dtype=torch.long)
    )
    return clipped(inputs, AlgorithmConfig(clip_low=0.2, clip_high=0.2))


def test_where_the_old_policy_is_the_policy_the_gradient_is_the_advantage():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    outputs = clipped_loss(logprobs, logprobs.detach(), [0.5, -3.0])
    outputs.loss.backward()
    assert outputs.sums["train/clip_fraction"] == 0
    assert logprobs.grad.tolist() == [-0.5, 3.0]


def test_the_ratio_is_clipped_only_where_that_makes_the_objective_smaller():
    logprobs = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    outputs = clipped_loss(logprobs, torch.zeros(4), [1.0, -1.0, 1.0, -1.0])
    outputs.loss.backward()
    assert (logprobs.grad != 0).tolist() == [False, True, True, False]
    assert outputs.sums["train/clip_fraction"] == 4, "outside the bounds, whichever way the advantage points"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("clip", "algorithm.loss='clip' is not a loss: use clipped or module:name"),
        ("no_such_module:loss", "algorithm.loss='no_such_module:loss' cannot be imported: ModuleNotFoundError"),
        ("math:no_such_name", "algorithm.loss='math:no_such_name' cannot be imported: AttributeError"),
        ("math:pi", "algorithm.loss='math:pi' is not a function"),
    ],
)
def test_a_loss_that_cannot_be_found_is_named_with_its_key(name, said):
    with pytest.raises(UserError) as error:
        check_loss(name)
    assert str(error.value).startswith(said)


def test_a_loss_is_found_by_its_name_or_in_a_module_of_the_users(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text("def flat(inputs, config): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_loss("clipped") is clipped
    assert find_loss("my_losses:flat").__name__ == "flat"


def test_k3_is_never_negative_and_its_mean_is_the_kl_divergence():
    torch.manual_seed(0)
    policy, reference = torch.log_softmax(torch.randn(2, 50, dtype=torch.float64), -1)
    exact = (policy.exp() * (policy - reference)).sum()
    assert (kl_k3(policy, reference) >= 0).all()
    assert float((policy.exp() * kl_k3(policy, reference)).sum()) == pytest.approx(float(exact))
    assert float((policy.exp() * kl_k1(policy, reference)).sum()) == pytest.approx(float(exact))


def test_the_expected_gradient_of_k2_is_that_of_the_kl_divergence_and_that_of_k1_is_zero():
    torch.manual_seed(0)
    logits = torch.randn(20, dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.randn(20, dtype=torch.float64), -1)

    def gradient(loss):
        return torch.autograd.grad(loss, logits)[0]

    policy = torch.log_softmax(logits, -1)
    exact = gradient((policy.exp() * (policy - reference)).sum())
    policy = torch.log_softmax(logits, -1)
    sampled = policy.exp().detach()  # on-policy: tokens drawn from the policy, no gradient through the draw
    assert torch.allclose(gradient((sampled * kl_k2(policy, reference)).sum()), exact)
    policy = torch.log_softmax(logits, -1)
    assert gradient((sampled * kl_k1(policy, reference)).sum()).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", lambda x: sum(map(sum, x)) / 18),
        ("sequence_mean", lambda x: sum(x[g][i] / LENGTHS[g][i] for g in (0, 1) for i in (0, 1)) / 4),
        ("constant", lambda x: sum(map(sum, x)) / MAX_TOKENS / 4),
        ("group_token_mean", lambda x: sum(sum(x[g]) / sum(LENGTHS[g]) for g in (0, 1)) / 2),
    ],
)
def test_aggregations_are_what_their_names_say(aggregation, expected):
    sums = [[1.5, -2.0], [0.25, 4.0]]  # the summed token losses of each completion
    total = divisor = 0.0
    for lengths, losses in zip(LENGTHS, sums, strict=True):
        divisor += group_divisor(aggregation, len(lengths), sum(lengths))
        for length, loss in zip(lengths, losses, strict=True):
            total += loss * token_weight(aggregation, length, sum(lengths), MAX_TOKENS)
    assert total / divisor == pytest.approx(expected(sums))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant", "group_token_mean"])
def test_a_group_whose_rewards_all_failed_takes_no_part(aggregation):
    assert group_divisor(aggregation, 0, 0) == 0.0


def test_k3_still_pulls_where_the_policy_is_far_from_the_reference():
    policy = torch.tensor([-0.1], requires_grad=True)
    kl_k3(policy, torch.tensor([-40.0])).sum().backward()
    assert policy.grad is not None and policy.grad.item() == pytest.approx(1.0)
