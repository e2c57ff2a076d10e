"""Log-probabilities of given tokens without materialising the logits, and the entropy for free.

The logits are computed in tiles: slices of the vocabulary, and of the rows if they are very many. The forward pass keeps each
row's largest logit and sum of exponentials, and the logits of the first tiles, as far as memory allows. The backward pass takes
the tiles in the same order and computes again what was not kept; it reads and writes each part of the head's gradient once for
every slice of rows.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyrhythm.kernels.compiling import WIDEST_VECTOR
from polyrhythm.kernels.elementwise import can_be_fused, softmax_exponentials, softmax_statistics
from polyrhythm.training.policy.accumulate import gradient_of

TILE_SIZE = (2_048, 8_192)
"""Most rows and columns of logits at a time, columns by multiples of WIDEST_VECTOR. A row's sum is that of its slices: their width is
not chosen by the number of rows, so that a row's bits do not depend on those beside it."""
KEPT_BYTES = 256 * 2**20
"""Of logits that wait for the backward pass."""
_CACHE_BYTES = 2**22
# As in the kernel: what is smaller adds nothing to a sum that has a 1, and infinite times zero is no number.
_LEAST_EXPONENT = -86.0
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
    softcap: float | None = None,
    in_place: bool = False,
    tile_size: tuple[int, int] = TILE_SIZE,
    kept_bytes: int = KEPT_BYTES,
) -> tuple[Tensor, Tensor]:
    """log softmax((hidden @ weight.T + bias) / temperature) at the targets, and the entropy without a gradient.

    With a soft cap c the logits are c * tanh(logits / c) before they are divided by the temperature.

    Target n is predicted by hidden row `row_N[n]`: a row that predicts several tokens meets the head once. Without
    `row_N` each row predicts one token. A frozen head's gradient is not computed. `in_place` adds the weight's gradient to
    `weight_VH.grad` where it is computed, instead of handing it to autograd.
    """
    rows = torch.arange(len(target_N), device=target_N.device) if row_N is None else row_N
    if len(hidden_MH) < _MIN_ROWS:
        hidden_MH = F.pad(hidden_MH, (0, 0, 0, _MIN_ROWS - len(hidden_MH)))
    if not torch.is_grad_enabled():  # `needs_input_grad` does not tell
        kept_bytes = 0
    return _TokenLogprobs.apply(  # pyright: ignore
        hidden_MH, weight_VH, bias_V, target_N, rows, temperature, softcap, in_place, tile_size, kept_bytes
    )


class _Tile(NamedTuple):
    rows: slice
    columns: slice
    slice_index: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def num_logits(self) -> int:
        return math.prod(self.shape)


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
        softcap: float | None,
        in_place: bool,
        tile_size: tuple[int, int],
        kept_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        tiles = _tiles(len(hidden_MH), len(weight_VH), tile_size)
        num_slices = tiles[-1].slice_index + 1
        largest_SM, total_SM, expected_SM = hidden_MH.new_empty(3, num_slices, len(hidden_MH), dtype=_wide(hidden_MH))
        # A target outside the vocabulary stays no number.
        picked_N = torch.full_like(target_N, torch.nan, dtype=largest_SM.dtype)
        num_kept = _num_that_fit(tiles, kept_bytes // largest_SM.element_size()) if any(ctx.needs_input_grad) else 0
        kept = [largest_SM.new_empty(tile.shape) for tile in tiles[:num_kept]]
        others = _reused_memory(tiles[num_kept:], like=largest_SM)
        for tile, logits in zip(tiles, itertools.chain(kept, others), strict=True):
            _write_logits(logits, hidden_MH, weight_VH, bias_V, temperature, softcap, tile)
            rows, columns, slice_index = tile
            # A list of those inside would make the host wait for an accelerator at every tile.
            nearest = logits[_place_in(row_N, rows), _place_in(target_N, columns)]
            picked_N = torch.where(_is_inside(row_N, rows) & _is_inside(target_N, columns), nearest, picked_N)
            _write_statistics(logits, *(part[slice_index, rows] for part in (largest_SM, total_SM, expected_SM)))
        largest_M = largest_SM.amax(0)
        below_SM = largest_SM - largest_M
        weight_SM = below_SM.exp()
        total_M = _sum_in_order(total_SM * weight_SM)
        expected_M = _sum_in_order(expected_SM * weight_SM + total_SM * (below_SM * weight_SM))
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, target_N, row_N, largest_M, total_M, picked_N)
        ctx.temperature, ctx.softcap, ctx.tiles, ctx.kept = temperature, softcap, tiles, kept
        ctx.summed_in = weight_VH if in_place else None
        entropy_N = (total_M.log() - expected_M / total_M)[row_N]
        ctx.mark_non_differentiable(entropy_N)
        return picked_N - (largest_M + total_M.log())[row_N], entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden_MH, weight_VH, bias_V, target_N, row_N, largest_M, total_M, picked_N = ctx.saved_tensors
        grad_N = grad_N / ctx.temperature
        # The gradient of the logits is grad * (one-hot - probability). Its factors per row go to the narrow side of
        # both products, and the one-hot part is added by index: the wide matrix needs no pass of its own for them.
        scale_M1 = (torch.zeros_like(total_M).index_add_(0, row_N, grad_N, alpha=-1) / total_M).unsqueeze(1)
        if ctx.softcap is not None:
            grad_N = grad_N * _slope_of_cap(picked_N, ctx.temperature, ctx.softcap)
        grad_N1 = grad_N.unsqueeze(1)
        scaled_MH = hidden_MH * scale_M1
        grad_hidden = torch.zeros_like(hidden_MH, dtype=total_M.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            new = ctx.summed_in is None
            grad_weight = torch.empty_like(weight_VH, dtype=total_M.dtype) if new else gradient_of(ctx.summed_in)
        grad_bias = torch.zeros_like(bias_V, dtype=total_M.dtype) if ctx.needs_input_grad[2] else None
        kept, ctx.kept = ctx.kept, []  # a second pass over the same graph computes all of them again
        others = _reused_memory(ctx.tiles[len(kept) :], like=total_M)
        for tile in ctx.tiles:
            rows, columns, _ = tile
            if kept:
                exponentials = kept.pop(0)
            else:
                exponentials = next(others)
                _write_logits(exponentials, hidden_MH, weight_VH, bias_V, ctx.temperature, ctx.softcap, tile)
            slope = None if ctx.softcap is None else _slope_of_cap(exponentials, ctx.temperature, ctx.softcap)
            _exponentiate(exponentials, largest_M[rows])
            if slope is not None:
                exponentials.mul_(slope)
            if grad_bias is not None:
                grad_bias[columns] += (scale_M1[rows].T @ exponentials).squeeze(0)
            grad_hidden[rows] += exponentials @ weight_VH[columns].to(exponentials.dtype)
            if grad_weight is not None:
                overwrites = ctx.summed_in is None and rows.start == 0
                grad_weight[columns].addmm_(exponentials.T, scaled_MH[rows], beta=0 if overwrites else 1)
        del exponentials, others
        grad_hidden.mul_(scale_M1).index_add_(0, row_N, weight_VH[target_N] * grad_N1)
        if grad_weight is not None:
            grad_weight.index_add_(0, target_N, hidden_MH[row_N] * grad_N1)
        if grad_bias is not None:
            grad_bias = grad_bias.index_add_(0, target_N, grad_N).to(bias_V.dtype)
        handed_over = None if ctx.summed_in is not None or grad_weight is None else grad_weight.to(weight_VH.dtype)
        return grad_hidden.to(hidden_MH.dtype), handed_over, grad_bias, *(None,) * 7


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _tiles(num_rows: int, num_columns: int, tile_size: tuple[int, int]) -> list[_Tile]:
    """Slices of the vocabulary, each with all its rows before the next one."""
    rows = _even_slices(num_rows, tile_size[0])
    columns = _even_slices(num_columns, tile_size[1], multiple_of=WIDEST_VECTOR)
    return [_Tile(row, column, index) for (index, column), row in itertools.product(enumerate(columns), rows)]


def _even_slices(length: int, longest: int, multiple_of: int = 1) -> list[slice]:
    """Even, so that none is too short to round like the others."""
    length_of_each = -(-length // (-(-length // longest)))
    step = -(-length_of_each // multiple_of) * multiple_of
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _num_that_fit(tiles: Sequence[_Tile], max_numbers: int) -> int:
    """How many tiles from the first on have no more numbers together."""
    return sum(numbers <= max_numbers for numbers in itertools.accumulate(tile.num_logits for tile in tiles))


def _reused_memory(tiles: Sequence[_Tile], like: Tensor) -> Iterator[Tensor]:
    """The same memory for one tile after the other: fresh memory for each costs a tenth of the time in page faults."""
    memory = like.new_empty(max((tile.num_logits for tile in tiles), default=0))
    for tile in tiles:
        yield memory[: tile.num_logits].view(tile.shape)


def _slope_of_cap(logits: Tensor, temperature: float, softcap: float) -> Tensor:
    """The derivative of capped logits, which were divided by the temperature: 1 - tanh^2."""
    return 1 - (logits * (temperature / softcap)).square_()


def _write_logits(
    out: Tensor,
    hidden_MH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    temperature: float,
    softcap: float | None,
    tile: _Tile,
) -> None:
    rows, columns, _ = tile
    # Of bf16 numbers too the product is in fp32: logits that were rounded first are 0.07 nats off.
    torch.mm(hidden_MH[rows].to(out.dtype), weight_VH[columns].to(out.dtype).T, out=out)
    if bias_V is not None:
        out += bias_V[columns]
    if softcap is not None:
        out.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1.0:
        out.div_(temperature)


def _write_statistics(logits: Tensor, largest: Tensor, total: Tensor, expected: Tensor) -> None:
    """Each row's largest logit, the sum of exponentials of the distances to it, and of those times the distances."""
    if can_be_fused(logits, logits.size(1)):
        return softmax_statistics(logits, largest, total, expected)
    for block, (top, total_part, expected_part) in _cached_blocks(logits, largest, total, expected):
        torch.amax(block, dim=-1, out=top).clamp_(min=torch.finfo(top.dtype).min)
        distances = (block - top.unsqueeze(1)).clamp_(min=_LEAST_EXPONENT)
        exponentials = distances.exp()
        torch.sum(exponentials, dim=-1, out=total_part)
        torch.linalg.vecdot(exponentials, distances, out=expected_part)


def _exponentiate(logits: Tensor, largest: Tensor) -> None:
    """In place, the exponentials of the distances to the largest."""
    if can_be_fused(logits, logits.size(1)):
        return softmax_exponentials(logits, largest)
    for block, (top,) in _cached_blocks(logits, largest):
        block.sub_(top.unsqueeze(1)).exp_()


def _sum_in_order(parts_SM: Tensor) -> Tensor:
    """Over the slices, one after the other: `sum` would round a column by its place among the others."""
    return functools.reduce(torch.add, parts_SM)


def _is_inside(index_N: Tensor, bounds: slice) -> Tensor:
    return (index_N >= bounds.start) & (index_N < bounds.stop)


def _place_in(index_N: Tensor, bounds: slice) -> Tensor:
    """Of those inside, counted from the first; the others get the place that is nearest."""
    return index_N.clamp(bounds.start, bounds.stop - 1).sub_(bounds.start)


def _cached_blocks(wide_MV: Tensor, *narrow: Tensor) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Row blocks that stay in a core's cache while several operations pass over them; an accelerator gets all rows at once.

    Of at least two rows, if there are: a lone row's sum is split over threads and rounds differently.
    """
    rows_per_block = max(2, _CACHE_BYTES // (wide_MV.size(1) * wide_MV.element_size()))
    count = max(1, wide_MV.size(0) // rows_per_block) if wide_MV.device.type == "cpu" else 1
    parts = zip(*(tensor.tensor_split(count) for tensor in narrow), strict=True)
    return zip(wide_MV.tensor_split(count), parts, strict=True)
