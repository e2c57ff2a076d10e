import pytest
import torch

from polyrhythm.algorithms.losses import clipped_policy_loss, group_divisor, kl_k1, kl_k2, kl_k3, token_weight

LENGTHS = [[3, 5], [2, 8]]
MAX_TOKENS = 10


def test_without_old_logprobs_the_gradient_is_the_advantage():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    losses, ratio = clipped_policy_loss(logprobs, None, torch.tensor([0.5, -3.0]), 0.2, 0.2)
    losses.sum().backward()
    assert ratio.tolist() == [1.0, 1.0]
    assert logprobs.grad.tolist() == [-0.5, 3.0]


def test_the_ratio_is_clipped_only_where_that_makes_the_objective_smaller():
    logprobs = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    losses, _ = clipped_policy_loss(logprobs, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2, 0.2)
    losses.sum().backward()
    assert (logprobs.grad != 0).tolist() == [False, True, True, False]


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
