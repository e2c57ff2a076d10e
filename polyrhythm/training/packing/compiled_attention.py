"""Packed attention by a compiled kernel, with gradients: which tokens attend to which, as tables that the kernel reads.

A completion's output is the same bits whether its prompt is shared with others or its own.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyrhythm.kernels.packed_attention import PackedAttention, QueryBlock, Segment, Tables, Task
from polyrhythm.kernels.tensors import with_dense_heads
from polyrhythm.training.packing.plan import Block

# Gradients of a row with few blocks are made in parts that add up: by the row alone, whatever the number of threads.
_MIN_TASKS = 4


@functools.lru_cache(maxsize=16)
def tables_of(blocks: tuple[Block, ...], repeats: int, queries_per_block: int) -> Tables:
    """A row's tables for a model with `repeats` query heads per key head; tasks of the backward pass cost about the same."""
    segments: list[Segment] = []
    queries: list[np.ndarray] = []
    tasks: list[Task] = []
    num_parts = -(-_MIN_TASKS // len(blocks))
    num_blocks = 0
    for block in blocks:
        own = _segments_of(block)
        costs: list[np.ndarray] = []
        for number, segment in enumerate(own, start=len(segments)):
            first = np.arange(0, segment.length * repeats, queries_per_block)
            queries.append(np.stack(QueryBlock(segment=np.full_like(first, number), first=first), axis=1))
            costs.append(segment.prompt_length + first // repeats + 1)
        segments += own
        work = np.cumsum(np.concatenate(costs))
        bounds = np.searchsorted(work, np.arange(num_parts + 1) * (work[-1] / num_parts))
        bounds[-1] = len(work)
        for part in range(num_parts):
            begin, end = num_blocks + int(bounds[part]), num_blocks + int(bounds[part + 1])
            tasks.append(Task(begin, end, start=block.prompt_start, stop=block.stop, part=part))
        num_blocks += len(work)
    return Tables(
        np.array(segments, np.int64), np.concatenate(queries).astype(np.int64), np.array(tasks, np.int64), num_parts
    )


def _segments_of(block: Block) -> list[Segment]:
    prompt = Segment(block.prompt_start, block.prompt_length, prompt_start=0, prompt_length=0)
    completions = zip(block.completion_starts, block.completion_lengths, strict=True)
    return [prompt, *(Segment(*own, block.prompt_start, block.prompt_length) for own in completions)]


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, kernel: PackedAttention, blocks: tuple[Block, ...],
        scale: float,
    ) -> Tensor:  # fmt: skip
        query, key, value = map(with_dense_heads, (query, key, value))
        tables = tables_of(blocks, query.size(1) // key.size(1), kernel.queries_per_block)
        out, logsumexp = kernel.forward(query, key, value, tables, scale)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.kernel, ctx.tables, ctx.scale = kernel, tables, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *ctx.kernel.backward(*ctx.saved_tensors, grad_out, ctx.tables, ctx.scale), None, None, None


def compiled_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: tuple[Block, ...], scale: float, kernel: PackedAttention
) -> Tensor:
    """[1, H, T, D] and [1, Hk, T, D] to [1, H, T, D]."""
    assert query.size(2) == key.size(2) == value.size(2) == blocks[-1].stop, (
        "the kernel reads what the blocks say, unchecked"
    )
    return _Compiled.apply(query, key, value, kernel, blocks, scale)  # pyright: ignore[reportReturnType]
