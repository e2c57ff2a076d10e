"""torch's variable-length flash attention on a CPU, for tests: the operators that its own Python code calls are given kernels.

They compute what the operators promise and refuse what those of CUDA refuse, so that `varlen_attn`, its checks and its
gradient are torch's own. That CUDA's kernel does what it promises is asked at the start of a run on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


@contextmanager
def strict_flash(shifted: bool = False) -> Iterator[None]:
    """Inside, flash attention runs on CPU tensors. `shifted` aligns its causal mask at the upper left, as older versions did."""
    library = torch.library.Library("aten", "IMPL")

    def forward(query: Tensor, key: Tensor, value: Tensor, *segments: Any, **options: Any) -> tuple[Tensor, ...]:
        bounds = _checked(query, key, value, *segments, **options)
        out = torch.empty_like(query)
        for rows, columns, queries, keys, values in _segments(query, key, value, bounds):
            weights = _weights(queries, keys, options["scale"], shifted)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
            del columns
        lse = torch.zeros(query.size(1), len(query))
        return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *segments: Any,
                 **options: Any) -> tuple[Tensor, ...]:  # fmt: skip
        assert grad_out.dtype == query.dtype, "flash attention takes one number format"
        bounds = _checked(query, key, value, *segments[:-2], False, **options)
        grads = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (query, key, value)]
        repeats = query.size(1) // key.size(1)
        for rows, columns, queries, keys, values in _segments(query, key, value, bounds):
            weights, upstream = _weights(queries, keys, options["scale"], shifted), grad_out[rows].float()
            slopes = torch.einsum("qhd,khd->hqk", upstream, values)
            scores = weights * (slopes - (slopes * weights).sum(-1, keepdim=True)) * options["scale"]
            grads[0][rows] = torch.einsum("hqk,khd->qhd", scores, keys)
            for grad, part in ((grads[1], torch.einsum("hqk,qhd->khd", scores, queries)),
                               (grads[2], torch.einsum("hqk,qhd->khd", weights, upstream))):  # fmt: skip
                grad[columns] = part.unflatten(1, (-1, repeats)).sum(2)
        return tuple(grad.to(query.dtype) for grad in grads)

    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


def _checked(
    query: Tensor, key: Tensor, value: Tensor, query_bounds: Tensor, key_bounds: Tensor, max_query: int, max_key: int,
    dropout: float, is_causal: bool, *_: Any, window_size_left: int, window_size_right: int, num_splits: int | None = None,
    **options: Any,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """What the library for CUDA checks, in its words where they are known; and that we ask for causal attention."""
    if query.dtype not in HALF:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    for tensor in (key, value):
        if tensor.dtype != query.dtype:
            raise RuntimeError("query and key must have the same dtype")
    for bounds in (query_bounds, key_bounds):
        if bounds.dtype != torch.int32:
            raise RuntimeError("cu_seqlens must have dtype int32")
        if not bounds.is_contiguous():
            raise RuntimeError("cu_seqlens must be contiguous")
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if query.size(-1) % 8 or query.size(-1) > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256, multiple of 8")
    if query.size(1) % key.size(1):
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    assert dropout == 0.0 and is_causal and (window_size_left, window_size_right) == (-1, 0)
    assert num_splits in (None, 1) and options["scale"]
    firsts, lasts = query_bounds.tolist(), key_bounds.tolist()
    assert firsts[0] == lasts[0] == 0 and firsts[-1] == len(query) and lasts[-1] == len(key) == len(value)
    assert max_query == max(stop - start for start, stop in pairwise(firsts)), "rows beyond it would not be computed"
    assert max_key == max(stop - start for start, stop in pairwise(lasts))
    return firsts, lasts


def _segments(query: Tensor, key: Tensor, value: Tensor, bounds: tuple[list[int], list[int]]) -> Iterator[tuple]:
    repeats = query.size(1) // key.size(1)
    for rows, columns in zip(*(map(slice, starts, starts[1:]) for starts in bounds), strict=True):
        keys, values = (tensor[columns].float().repeat_interleave(repeats, 1) for tensor in (key, value))
        yield rows, columns, query[rows].float(), keys, values


def _weights(queries: Tensor, keys: Tensor, scale: float, shifted: bool) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
    corner = 0 if shifted else len(keys) - len(queries)
    hidden = torch.ones(len(queries), len(keys), dtype=torch.bool).triu(1 + corner)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)
