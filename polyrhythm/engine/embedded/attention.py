"""Attention that also returns its log-sum-exp, so that parts over different keys can be merged exactly."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Elementwise kernels do the last elements of a tensor with scalar code, which rounds exp differently from vector code.
_VECTOR_MULTIPLE = 32

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


def attend_explicitly(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, visible: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The same by plain arithmetic, with scores that are hidden by a mask or capped. Nothing visible: a sum of zero."""
    num_repeats = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(num_repeats, 1), values.repeat_interleave(num_repeats, 1)
    scores = torch.matmul(queries, keys.transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp.clamp(min=torch.finfo(scores.dtype).min).unsqueeze(-1)).exp()
    return torch.matmul(weights, values), logsumexp


def merge_all(pieces: Sequence[tuple[Tensor, Tensor]], sinks: Tensor | None = None) -> Tensor:
    """Attention over the union of disjoint sets of keys; a sink takes its share of the weight and gives nothing."""
    output, logsumexp = pieces[0]
    for piece in pieces[1:]:
        output = merge((output, logsumexp), piece)
        logsumexp = torch.logaddexp(logsumexp, piece[1])
    if sinks is not None:
        sinks = sinks.view(1, *sinks.shape, *[1] * (logsumexp.dim() - 1 - sinks.dim()))
        output = output * torch.sigmoid(logsumexp - sinks).unsqueeze(-1)
    return output


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Attention over the union of two disjoint sets of keys, from the output and log-sum-exp over each."""
    (first_output, first_logsumexp), (second_output, second_logsumexp) = first, second
    weight_of_second = torch.sigmoid(second_logsumexp - first_logsumexp).unsqueeze(-1)
    return torch.lerp(first_output, second_output, weight_of_second)


def merge_rows(first: Sequence[Sequence[Tensor]], second: Sequence[Sequence[Tensor]], out: Tensor) -> None:
    """`merge` for many requests at once, along the first dimension; a row's bits do not depend on the other rows."""
    first_outputs, second_outputs = torch.cat([part[0] for part in first]), torch.cat([part[0] for part in second])
    num_rows = len(first_outputs)
    padding = first_outputs.new_zeros(-num_rows % _VECTOR_MULTIPLE, *first_outputs.shape[1:-1])
    first_sums = torch.cat([*(part[1] for part in first), padding])
    second_sums = torch.cat([*(part[1] for part in second), padding])
    weight_of_second = torch.sigmoid(second_sums - first_sums)[:num_rows].unsqueeze(-1)
    torch.lerp(first_outputs, second_outputs, weight_of_second, out=out)
