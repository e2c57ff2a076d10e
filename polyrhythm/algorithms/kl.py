"""Estimators of the KL divergence to the reference, token by token. docs/losses.md has the formulas."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # beyond this exp() says nothing more and would overflow


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
