"""Packed attention in fp32 on a CPU by the kernel `packed.c`, forward and backward.

A completion's output is the same bits whether its prompt is shared with others or its own.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyrhythm.kernels import LANES, are_served, load_kernel
from polyrhythm.training.packing.layout import Block

# Gradients of a row with few blocks are made in parts that add up: by the row alone, whatever the number of threads.
_MIN_TASKS = 4


class Rows(ctypes.Structure):
    """A [1, H, T, D] tensor whose heads are dense: where it begins, and its strides in numbers."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("token", "head", "part"))]


def rows_of(tensor: Tensor) -> Rows:
    return Rows(tensor.data_ptr(), tensor.stride(2), tensor.stride(1), tensor.stride(0))


@dataclass(frozen=True, eq=False)
class Tables:
    """A row's segments, blocks of queries and tasks of the backward pass, as the kernel reads them."""

    segments: np.ndarray
    blocks: np.ndarray
    tasks: np.ndarray
    num_parts: int


@functools.lru_cache(maxsize=16)
def tables_of(blocks: tuple[Block, ...], repeats: int, queries_per_block: int) -> Tables:
    segments: list[tuple[int, int, int, int]] = []
    queries: list[np.ndarray] = []
    tasks: list[tuple[int, int, int, int, int]] = []
    num_parts = -(-_MIN_TASKS // len(blocks))
    num_blocks = 0
    for block in blocks:
        own = [(block.prompt_start, block.prompt_length, 0, 0)]
        for start, length in zip(block.completion_starts, block.completion_lengths, strict=True):
            own.append((start, length, block.prompt_start, block.prompt_length))
        costs: list[np.ndarray] = []
        for number, (_, length, _, prompt_length) in enumerate(own, start=len(segments)):
            first = np.arange(0, length * repeats, queries_per_block)
            queries.append(np.stack([np.full_like(first, number), first], axis=1))
            costs.append(prompt_length + first // repeats + 1)
        segments += own
        work = np.cumsum(np.concatenate(costs))
        bounds = np.searchsorted(work, np.arange(num_parts + 1) * (work[-1] / num_parts))
        bounds[-1] = len(work)
        for part in range(num_parts):
            begin, end = num_blocks + int(bounds[part]), num_blocks + int(bounds[part + 1])
            tasks.append((begin, end, block.prompt_start, block.stop, part))
        num_blocks += len(work)
    return Tables(
        np.array(segments, np.int64), np.concatenate(queries).astype(np.int64), np.array(tasks, np.int64), num_parts
    )


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        library: ctypes.CDLL,
        blocks: tuple[Block, ...],
        scale: float,
    ) -> Tensor:
        query, key, value = map(with_dense_heads, (query, key, value))
        _, num_heads, num_tokens, head_dim = query.shape
        num_kv_heads = key.size(1)
        tables = tables_of(blocks, num_heads // num_kv_heads, library.queries_per_block())
        out = query.new_empty(1, num_tokens, num_heads, head_dim).transpose(1, 2)
        logsumexp = query.new_empty(num_heads * num_tokens)
        library.attention_forward(
            _pointer(tables.segments), _pointer(tables.blocks), ctypes.c_int64(len(tables.blocks)), num_kv_heads,
            ctypes.c_int64(num_tokens), rows_of(query), rows_of(key), rows_of(value), ctypes.c_float(scale), rows_of(out),
            ctypes.c_void_p(logsumexp.data_ptr()), torch.get_num_threads(),
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.library, ctx.tables, ctx.scale = library, tables, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, logsumexp = ctx.saved_tensors
        tables: Tables = ctx.tables
        grad_out = with_dense_heads(grad_out)
        _, num_kv_heads, num_tokens, head_dim = key.shape
        grad_query = torch.empty_like(out)
        grad_key, grad_value = (
            key.new_empty(tables.num_parts, num_tokens, num_kv_heads, head_dim).transpose(1, 2) for _ in range(2)
        )
        ctx.library.attention_backward(
            _pointer(tables.segments), _pointer(tables.blocks), _pointer(tables.tasks), ctypes.c_int64(len(tables.tasks)),
            num_kv_heads, ctypes.c_int64(num_tokens), rows_of(query), rows_of(key), rows_of(value),
            ctypes.c_float(ctx.scale), rows_of(out), ctypes.c_void_p(logsumexp.data_ptr()), rows_of(grad_out),
            rows_of(grad_query), rows_of(grad_key), rows_of(grad_value), torch.get_num_threads(),
        )  # fmt: skip
        return grad_query, _sum_of_parts(grad_key), _sum_of_parts(grad_value), None, None, None


def compiled_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: tuple[Block, ...], scale: float, library: ctypes.CDLL
) -> Tensor:
    """[1, H, T, D] and [1, Hk, T, D] to [1, H, T, D]."""
    assert query.size(2) == key.size(2) == value.size(2) == blocks[-1].stop, (
        "the kernel reads what the blocks say, unchecked"
    )
    return _Compiled.apply(query, key, value, library, blocks, scale)  # pyright: ignore[reportReturnType]


def library_for(query: Tensor, key: Tensor, value: Tensor) -> ctypes.CDLL | None:
    """The kernel for tensors like these, where there is one."""
    head_dim, repeats = query.size(-1), query.size(1) // key.size(1)
    if not are_served(query, key, value) or head_dim % LANES:
        return None
    return load_kernel("packed", HEAD_DIM=head_dim, REPEATS=repeats)


def _sum_of_parts(gradient: Tensor) -> Tensor:
    first, *others = gradient.split(1)
    for other in others:
        first.add_(other)
    return first


def with_dense_heads(row: Tensor) -> Tensor:
    """Kernels take any strides but read a head's values as neighbours in memory, unchecked."""
    return row if row.stride(-1) == 1 else row.contiguous()


def _pointer(table: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(table.ctypes.data)
