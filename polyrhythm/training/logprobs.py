"""Log-probabilities of given tokens without materialising the logits, and the entropy for free.

The forward pass works on chunks of rows and keeps only each row's log-sum-exp; the backward pass computes the
probabilities again, by slices of the vocabulary, so that each part of the head's gradient is written once.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Most memory that logits take at a time."""


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """log softmax((hidden @ weight.T + bias) / temperature) at the targets, and that distribution's entropy (no gradient)."""
    return _TokenLogprobs.apply(hidden_NH, weight_VH, bias_V, target_N, temperature, chunk_bytes)  # pyright: ignore[reportReturnType]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature: float,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        num_rows, vocab_size = hidden_NH.size(0), weight_VH.size(0)
        logprobs_N, entropy_N, lse_N = (hidden_NH.new_empty(num_rows, dtype=_wide(hidden_NH)) for _ in range(3))
        chunks = list(_spans(num_rows, vocab_size, chunk_bytes))
        probabilities_NV = None
        for rows in chunks:
            logits = _logits(hidden_NH[rows], weight_VH, bias_V, temperature)
            largest = logits.amax(dim=-1, keepdim=True)
            logits -= largest
            picked = logits.gather(1, target_N[rows, None]).squeeze(1)
            exponentials = logits.exp()
            total = exponentials.sum(dim=-1)
            expected = torch.linalg.vecdot(exponentials, logits)
            logprobs_N[rows] = picked - total.log()
            entropy_N[rows] = total.log() - expected / total
            lse_N[rows] = largest.squeeze(1) + total.log()
            # What fits in one chunk is kept: the backward pass of a small micro-batch then has nothing to compute again.
            if len(chunks) == 1 and any(ctx.needs_input_grad):
                probabilities_NV = exponentials.div_(total.unsqueeze(1))
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, target_N, lse_N, probabilities_NV)
        ctx.temperature, ctx.chunk_bytes = temperature, chunk_bytes
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_NH, weight_VH, bias_V, target_N, lse_N, kept_NV = ctx.saved_tensors
        grad_N = grad_N / ctx.temperature
        _, weight_needs_grad, bias_needs_grad, *_ = ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden_NH, dtype=_wide(hidden_NH))
        grad_weight = torch.empty_like(weight_VH) if weight_needs_grad else None
        grad_bias = torch.empty_like(bias_V) if bias_needs_grad else None
        num_rows, vocab_size = hidden_NH.size(0), weight_VH.size(0)
        spans = [slice(0, vocab_size)] if kept_NV is not None else _spans(vocab_size, num_rows, ctx.chunk_bytes)
        for columns in spans:
            if kept_NV is not None:
                grad_logits = kept_NV * -grad_N.unsqueeze(1)
            else:
                bias = None if bias_V is None else bias_V[columns]
                logits = _logits(hidden_NH, weight_VH[columns], bias, ctx.temperature)
                grad_logits = logits.sub_(lse_N.unsqueeze(1)).exp_().mul_(-grad_N.unsqueeze(1))
            rows = ((target_N >= columns.start) & (target_N < columns.stop)).nonzero().squeeze(1)
            grad_logits[rows, target_N[rows] - columns.start] += grad_N[rows]
            if grad_bias is not None:
                grad_bias[columns] = grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(weight_VH.dtype)
            grad_hidden += grad_logits @ weight_VH[columns]
            if grad_weight is not None:
                torch.mm(grad_logits.T, hidden_NH, out=grad_weight[columns])
        return grad_hidden.to(hidden_NH.dtype), grad_weight, grad_bias, None, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _logits(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden_NH, weight_VH, bias_V).to(_wide(hidden_NH))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _spans(length: int, width: int, max_bytes: int) -> Iterator[slice]:
    """Even slices of `length` with at most `max_bytes` of fp32 in `width` columns each."""
    per_slice = max(1, max_bytes // (4 * width))
    count = -(-length // per_slice)
    for index in range(count):
        yield slice(index * length // count, (index + 1) * length // count)
