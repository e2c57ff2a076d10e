"""Attention that also returns its log-sum-exp, so that parts over different keys can be merged exactly."""

import torch
from torch import Tensor

_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of [batch, heads, length, dim] tensors; keys may have fewer heads (grouped queries)."""
    if queries.device.type == "cpu":
        return _cpu_flash(queries, keys, values, 0.0, causal, scale=scale)
    return _attend_with_public_operators(queries, keys, values, scale=scale, causal=causal)


def _attend_with_public_operators(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """The same on any device. Tried on CPU only: no accelerator has run it."""
    num_repeats = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(num_repeats, 1), values.repeat_interleave(num_repeats, 1)
    scores = torch.matmul(queries, keys.transpose(2, 3)) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(future, float("-inf"))
    logsumexp = scores.logsumexp(-1)
    return torch.matmul((scores - logsumexp.unsqueeze(-1)).exp(), values), logsumexp


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Attention over the union of two disjoint sets of keys, from the output and log-sum-exp over each."""
    (first_output, first_logsumexp), (second_output, second_logsumexp) = first, second
    weight_of_second = torch.sigmoid(second_logsumexp - first_logsumexp).unsqueeze(-1)
    return torch.lerp(first_output, second_output, weight_of_second)
