"""Log-probabilities of given tokens without materialising the logits, and the entropy for free.

The forward pass works on chunks of rows and keeps only each row's log-sum-exp; the backward pass computes the
probabilities again, by slices of the vocabulary, so that each part of the head's gradient is written once.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyrhythm.training.accumulate import gradient_of

CHUNK_BYTES = 64 * 2**20
"""Most memory that logits take at a time; twice as much for those of a small micro-batch, which are kept."""
_CACHE_BYTES = 2**22
# Matrix libraries round products of one to three rows differently, others of up to fifteen: a lone completion's head meets
# rows of zeros besides its own, so that its bits are those it has among others.
_MIN_ROWS = 16


def token_logprobs(
    hidden_MH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    *,
    row_N: Tensor | None = None,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    in_place: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """log softmax((hidden @ weight.T + bias) / temperature) at the targets, and the entropy without a gradient.

    Target n is predicted by hidden row `row_N[n]`: a row that predicts several tokens meets the head once. Without
    `row_N` each row predicts one token. A frozen head's gradient is not computed. `in_place` adds the weight's gradient to
    `weight_VH.grad` where it is computed, instead of handing it to autograd.
    """
    rows = torch.arange(len(target_N), device=target_N.device) if row_N is None else row_N
    if len(hidden_MH) < _MIN_ROWS:
        hidden_MH = F.pad(hidden_MH, (0, 0, 0, _MIN_ROWS - len(hidden_MH)))
    return _TokenLogprobs.apply(hidden_MH, weight_VH, bias_V, target_N, rows, temperature, in_place, chunk_bytes)  # pyright: ignore


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
        in_place: bool,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        num_rows, vocab_size = hidden_MH.size(0), weight_VH.size(0)
        largest_M, total_M, expected_M = (hidden_MH.new_empty(num_rows, dtype=_wide(hidden_MH)) for _ in range(3))
        picked_N = torch.empty_like(target_N, dtype=largest_M.dtype)
        # What fits in two chunks is kept: the backward pass of a small micro-batch has nothing to compute again.
        fits = num_rows * vocab_size * 4 <= 2 * chunk_bytes
        keeps = fits and any(ctx.needs_input_grad)
        chunks = [slice(0, num_rows)] if fits else list(_slices(num_rows, vocab_size, chunk_bytes))
        buffer = _buffer(chunks, vocab_size, like=largest_M)
        for rows in chunks:
            logits = _logits(hidden_MH[rows], weight_VH, bias_V, temperature, buffer)
            members = _inside(row_N, rows)
            picked_N[members] = logits[row_N[members] - rows.start, target_N[members]]
            for block, (largest, total, expected) in _cached_blocks(
                logits, largest_M[rows], total_M[rows], expected_M[rows]
            ):
                torch.amax(block, dim=-1, out=largest)
                exponentials = block.sub_(largest.unsqueeze(1)).exp()
                torch.sum(exponentials, dim=-1, out=total)
                torch.linalg.vecdot(exponentials, block, out=expected)
                if keeps:
                    block.copy_(exponentials)
        ctx.save_for_backward(
            hidden_MH, weight_VH, bias_V, target_N, row_N, largest_M, total_M, buffer if keeps else None
        )
        ctx.temperature, ctx.chunk_bytes = temperature, chunk_bytes
        ctx.summed_in = weight_VH if in_place else None
        entropy_N = (total_M.log() - expected_M / total_M)[row_N]
        ctx.mark_non_differentiable(entropy_N)
        return picked_N - (largest_M + total_M.log())[row_N], entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden_MH, weight_VH, bias_V, target_N, row_N, largest_M, total_M, kept = ctx.saved_tensors
        grad_N = grad_N / ctx.temperature
        # The gradient of the logits is grad * (one-hot - probability). Its factors per row go to the narrow side of
        # both products, and the one-hot part is added by index: the wide matrix needs no pass of its own for them.
        scale_M1 = (torch.zeros_like(total_M).index_add_(0, row_N, grad_N, alpha=-1) / total_M).unsqueeze(1)
        grad_N1 = grad_N.unsqueeze(1)
        scaled_MH = (hidden_MH * scale_M1).to(weight_VH.dtype)
        grad_hidden = torch.zeros_like(hidden_MH, dtype=total_M.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight_VH) if ctx.summed_in is None else gradient_of(ctx.summed_in)
        grad_bias = torch.empty_like(bias_V) if ctx.needs_input_grad[2] else None
        num_rows, vocab_size = hidden_MH.size(0), weight_VH.size(0)
        slices = [slice(0, vocab_size)] if kept is not None else list(_slices(vocab_size, num_rows, ctx.chunk_bytes))
        buffer = _buffer(slices, num_rows, like=total_M) if kept is None else kept
        for columns in slices:
            if kept is None:
                bias = None if bias_V is None else bias_V[columns]
                exponentials = _logits(hidden_MH, weight_VH[columns], bias, ctx.temperature, buffer)
                for block, (largest,) in _cached_blocks(exponentials, largest_M):
                    block.sub_(largest.unsqueeze(1)).exp_()
            else:
                exponentials = kept.view(num_rows, vocab_size)
            if grad_bias is not None:
                grad_bias[columns] = (scale_M1.T.to(exponentials.dtype) @ exponentials).squeeze(0)
            exponentials = exponentials.to(weight_VH.dtype)
            grad_hidden += exponentials @ weight_VH[columns]
            if grad_weight is not None:
                grad_weight[columns].addmm_(exponentials.T, scaled_MH, beta=0 if ctx.summed_in is None else 1)
        grad_hidden.mul_(scale_M1).index_add_(0, row_N, weight_VH[target_N] * grad_N1)
        if grad_weight is not None:
            grad_weight.index_add_(0, target_N, (hidden_MH[row_N] * grad_N1).to(weight_VH.dtype))
        if grad_bias is not None:
            grad_bias.index_add_(0, target_N, grad_N.to(grad_bias.dtype))
        handed_over = grad_weight if ctx.summed_in is None else None
        return grad_hidden.to(hidden_MH.dtype), handed_over, grad_bias, None, None, None, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _logits(hidden_MH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float, buffer: Tensor) -> Tensor:
    """Written into the buffer: fresh memory for every chunk costs a tenth of the time in page faults."""
    num_rows, num_columns = hidden_MH.size(0), weight_VH.size(0)
    logits = buffer[: num_rows * num_columns].view(num_rows, num_columns)
    if hidden_MH.dtype == buffer.dtype:
        torch.mm(hidden_MH, weight_VH.T, out=logits)
    else:
        logits.copy_(hidden_MH @ weight_VH.T)
    if bias_V is not None:
        logits += bias_V
    return logits if temperature == 1.0 else logits.div_(temperature)


def _buffer(slices: list[slice], width: int, like: Tensor) -> Tensor:
    return like.new_empty(max(part.stop - part.start for part in slices) * width)


def _slices(length: int, width: int, max_bytes: int) -> Iterator[slice]:
    """Even slices of `length`, each with `width` numbers of fp32 per item in at most `max_bytes`."""
    count = -(-length * width * 4 // max_bytes)
    count = min(max(count, 1), length)
    for index in range(count):
        yield slice(index * length // count, (index + 1) * length // count)


def _inside(index_N: Tensor, bounds: slice) -> Tensor:
    return ((index_N >= bounds.start) & (index_N < bounds.stop)).nonzero().squeeze(1)


def _cached_blocks(wide_MV: Tensor, *narrow: Tensor) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Row blocks that stay in a core's cache while several operations pass over them.

    Of at least two rows, if there are: a lone row's sum is split over threads and rounds differently.
    """
    rows_per_block = max(2, _CACHE_BYTES // (wide_MV.size(1) * wide_MV.element_size()))
    count = max(1, wide_MV.size(0) // rows_per_block)
    parts = zip(*(tensor.tensor_split(count) for tensor in narrow), strict=True)
    return zip(wide_MV.tensor_split(count), parts, strict=True)
