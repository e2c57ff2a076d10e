"""Log-probabilities of given tokens without materialising the logits, and the entropy for free.

The forward pass works on chunks of rows and keeps only each row's log-sum-exp; the backward pass computes the
probabilities again, by slices of the vocabulary, so that each part of the head's gradient is written once.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Most memory that logits take at a time; the forward pass needs it twice."""


def token_logprobs(
    hidden_MH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    *,
    row_N: Tensor | None = None,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """log softmax((hidden @ weight.T + bias) / temperature) at the targets, and the entropy without a gradient.

    Target n is predicted by hidden row `row_N[n]`: a row that predicts several tokens meets the head once. Without
    `row_N` each row predicts one token. A frozen head's gradient is not computed.
    """
    rows = torch.arange(len(target_N), device=target_N.device) if row_N is None else row_N
    return _TokenLogprobs.apply(hidden_MH, weight_VH, bias_V, target_N, rows, temperature, chunk_bytes)  # pyright: ignore


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        row_N: Tensor,
        temperature: float,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        num_rows, vocab_size = hidden_MH.size(0), weight_VH.size(0)
        entropy_M, lse_M = (hidden_MH.new_empty(num_rows, dtype=_wide(hidden_MH)) for _ in range(2))
        picked_N = torch.empty_like(target_N, dtype=entropy_M.dtype)
        probabilities_MV = None
        chunks = list(_slices(num_rows, vocab_size, chunk_bytes))
        for rows in chunks:
            logits = _logits(hidden_MH[rows], weight_VH, bias_V, temperature)
            members = _inside(row_N, rows)
            picked_N[members] = logits[row_N[members] - rows.start, target_N[members]]
            largest = logits.amax(dim=-1, keepdim=True)
            exponentials = logits.sub_(largest).exp()
            total = exponentials.sum(dim=-1)
            lse_M[rows] = total.log() + largest.squeeze(1)
            entropy_M[rows] = total.log() - torch.linalg.vecdot(exponentials, logits) / total
            # What fits in one chunk is kept: the backward pass of a small micro-batch has nothing to compute again.
            if len(chunks) == 1 and any(ctx.needs_input_grad):
                probabilities_MV = exponentials.div_(total.unsqueeze(1))
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, target_N, row_N, lse_M, probabilities_MV)
        ctx.temperature, ctx.chunk_bytes = temperature, chunk_bytes
        entropy_N = entropy_M[row_N]
        ctx.mark_non_differentiable(entropy_N)
        return picked_N - lse_M[row_N], entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden_MH, weight_VH, bias_V, target_N, row_N, lse_M, kept_MV = ctx.saved_tensors
        grad_N = grad_N / ctx.temperature
        minus_grad_M1 = torch.zeros_like(lse_M).index_add_(0, row_N, grad_N, alpha=-1).unsqueeze(1)
        grad_hidden = torch.zeros_like(hidden_MH, dtype=lse_M.dtype)
        grad_weight = torch.empty_like(weight_VH) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias_V) if ctx.needs_input_grad[2] else None
        num_rows, vocab_size = hidden_MH.size(0), weight_VH.size(0)
        slices = _slices(vocab_size, num_rows, ctx.chunk_bytes) if kept_MV is None else [slice(0, vocab_size)]
        for columns in slices:
            if kept_MV is None:
                bias = None if bias_V is None else bias_V[columns]
                logits = _logits(hidden_MH, weight_VH[columns], bias, ctx.temperature)
                grad_logits = logits.sub_(lse_M.unsqueeze(1)).exp_().mul_(minus_grad_M1)
            else:
                grad_logits = kept_MV * minus_grad_M1
            members = _inside(target_N, columns)
            places = (row_N[members], target_N[members] - columns.start)
            grad_logits.index_put_(places, grad_N[members], accumulate=True)
            if grad_bias is not None:
                grad_bias[columns] = grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(weight_VH.dtype)
            grad_hidden += grad_logits @ weight_VH[columns]
            if grad_weight is not None:
                torch.mm(grad_logits.T, hidden_MH, out=grad_weight[columns])
        return grad_hidden.to(hidden_MH.dtype), grad_weight, grad_bias, None, None, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _logits(hidden_MH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    logits = F.linear(hidden_MH, weight_VH, bias_V).to(_wide(hidden_MH))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _slices(length: int, width: int, max_bytes: int) -> Iterator[slice]:
    """Even slices of `length`, each with `width` numbers of fp32 per item in at most `max_bytes`."""
    count = -(-length * width * 4 // max_bytes)
    count = min(max(count, 1), length)
    for index in range(count):
        yield slice(index * length // count, (index + 1) * length // count)


def _inside(index_N: Tensor, bounds: slice) -> Tensor:
    return ((index_N >= bounds.start) & (index_N < bounds.stop)).nonzero().squeeze(1)
