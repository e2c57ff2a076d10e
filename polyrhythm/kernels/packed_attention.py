"""Attention of a packed row by `packed.c`, forward and backward: fp32 on a CPU."""

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyrhythm.kernels.compiling import COUNT, FLOAT, INT, POINTER, WIDEST_VECTOR, load_kernel
from polyrhythm.kernels.tensors import are_served, with_dense_heads


class Segment(NamedTuple):
    """A prompt or a completion: its tokens attend to the whole prompt before it, if it has one, and causally to their own."""

    start: int
    length: int
    prompt_start: int
    prompt_length: int


class QueryBlock(NamedTuple):
    """Neighbouring queries of one segment: the segment's number, and the first of them, counted within it."""

    segment: int | np.ndarray
    first: int | np.ndarray


class Task(NamedTuple):
    """Blocks of the backward pass that one thread does, the tokens whose gradients they add to, and in which part."""

    first_block: int
    last_block: int
    start: int
    stop: int
    part: int


@dataclass(frozen=True, eq=False)
class Tables:
    """A row's segments, blocks and tasks, each a table of int64 with a line for each; tasks write to `num_parts` parts."""

    segments: np.ndarray
    blocks: np.ndarray
    tasks: np.ndarray
    num_parts: int


class _Rows(ctypes.Structure):
    """A [parts, H, T, D] tensor whose heads are dense: where it begins, and its strides in numbers."""

    STRIDES = ("token", "head", "part")
    _fields_ = [("data", POINTER), *((name, COUNT) for name in STRIDES)]

    @classmethod
    def of(cls, tensor: Tensor) -> "_Rows":
        return cls(data=tensor.data_ptr(), token=tensor.stride(2), head=tensor.stride(1), part=tensor.stride(0))


@dataclass(frozen=True)
class PackedAttention:
    """The kernel for one head size and number of query heads per key head. Tables are read as they are, unchecked."""

    _library: ctypes.CDLL

    @property
    def queries_per_block(self) -> int:
        return self._library.queries_per_block()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tables: Tables, scale: float) -> tuple[Tensor, Tensor]:
        """[1, H, T, D] and [1, Hk, T, D] with dense heads to [1, H, T, D], and the log-sum-exps for the backward pass."""
        _, num_heads, num_tokens, head_dim = query.shape
        out = query.new_empty(1, num_tokens, num_heads, head_dim).transpose(1, 2)
        logsumexp = query.new_empty(num_heads * num_tokens)
        self._library.attention_forward(
            tables.segments.ctypes.data, tables.blocks.ctypes.data, len(tables.blocks), key.size(1), num_tokens,
            _Rows.of(query), _Rows.of(key), _Rows.of(value), scale, _Rows.of(out), logsumexp.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out, logsumexp

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor,
        tables: Tables, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The gradients of query, key and value."""
        grad_out = with_dense_heads(grad_out)
        _, num_kv_heads, num_tokens, head_dim = key.shape
        grad_query = torch.empty_like(out)
        grad_key, grad_value = (
            key.new_empty(tables.num_parts, num_tokens, num_kv_heads, head_dim).transpose(1, 2) for _ in range(2)
        )
        self._library.attention_backward(
            tables.segments.ctypes.data, tables.blocks.ctypes.data, tables.tasks.ctypes.data, len(tables.tasks),
            num_kv_heads, num_tokens, _Rows.of(query), _Rows.of(key), _Rows.of(value), scale, _Rows.of(out),
            logsumexp.data_ptr(), _Rows.of(grad_out), _Rows.of(grad_query), _Rows.of(grad_key), _Rows.of(grad_value),
            torch.get_num_threads(),
        )  # fmt: skip
        return grad_query, _sum_of_parts(grad_key), _sum_of_parts(grad_value)


def packed_attention_for(query: Tensor, key: Tensor, value: Tensor) -> PackedAttention | None:
    """The kernel for tensors like these, where this machine has it."""
    head_dim, repeats = query.size(-1), query.size(1) // key.size(1)
    if not are_served(query, key, value) or head_dim % WIDEST_VECTOR:
        return None
    library = load_kernel(
        "packed", _declare, HEAD_DIM=head_dim, REPEATS=repeats, SEGMENT_FIELDS=Segment._fields,
        BLOCK_FIELDS=QueryBlock._fields, TASK_FIELDS=Task._fields, STRIDES=_Rows.STRIDES,
    )  # fmt: skip
    return PackedAttention(library) if library else None


def _declare(library: ctypes.CDLL) -> None:
    library.attention_forward.argtypes = [
        POINTER, POINTER, COUNT, INT, COUNT, _Rows, _Rows, _Rows, FLOAT, _Rows, POINTER, INT,
    ]  # fmt: skip
    library.attention_backward.argtypes = [
        POINTER, POINTER, POINTER, COUNT, INT, COUNT, _Rows, _Rows, _Rows, FLOAT, _Rows, POINTER, _Rows, _Rows, _Rows,
        _Rows, INT,
    ]  # fmt: skip


def _sum_of_parts(gradient: Tensor) -> Tensor:
    first, *others = gradient.split(1)
    for other in others:
        first.add_(other)
    return first
