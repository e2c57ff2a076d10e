"""Token losses and how they are added up. docs/losses.md has the formulas.

Everything here is a sum over tokens, never a mean: the division by the step's total happens once, in `optim_step`.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # beyond this exp() says nothing more and would overflow


def clipped_policy_loss(
    logprobs_N: Tensor, old_logprobs_N: Tensor | None, advantages_N: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """The PPO objective per token, and the probability ratio. Without old log-probabilities the ratio is exactly 1."""
    old_N = logprobs_N.detach() if old_logprobs_N is None else old_logprobs_N
    ratio_N = torch.exp(logprobs_N - old_N)
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N), ratio_N


def kl_k1(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Unbiased, can be negative. As a loss its expected gradient is zero: it belongs in the reward."""
    return logprobs_N - reference_logprobs_N


def kl_k2(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Half the squared log-ratio; on-policy its gradient is that of the reverse KL divergence."""
    return 0.5 * (logprobs_N - reference_logprobs_N).square()


def kl_k3(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Unbiased and never negative (GRPO); its gradient is a first-order approximation."""
    gap_N = (reference_logprobs_N - logprobs_N).clamp(max=MAX_LOG_RATIO)  # only this side can overflow
    return torch.expm1(gap_N) - gap_N


KL_LOSSES = {"k2": kl_k2, "k3": kl_k3}  # k1 is not among them: it is subtracted from the reward


def token_weight(aggregation: str, num_tokens: int, num_group_tokens: int, max_tokens: int) -> float:
    """What one token of a completion of `num_tokens` in a group of `num_group_tokens` counts."""
    if aggregation == "token_mean":
        return 1.0
    if aggregation == "sequence_mean":
        return 1.0 / num_tokens
    if aggregation == "constant":
        return 1.0 / max_tokens
    if aggregation == "group_token_mean":
        return 1.0 / num_group_tokens
    raise ValueError(f"unknown aggregation {aggregation!r}")


def group_divisor(aggregation: str, num_completions: int, num_group_tokens: int) -> float:
    """What a group adds to the number that the step's gradient is divided by."""
    if aggregation == "token_mean":
        return float(num_group_tokens)
    if aggregation in ("sequence_mean", "constant"):
        return float(num_completions)
    if aggregation == "group_token_mean":
        return 1.0 if num_completions else 0.0
    raise ValueError(f"unknown aggregation {aggregation!r}")
