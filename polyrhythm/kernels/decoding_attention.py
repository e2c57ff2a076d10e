"""Attention of one decoding step for all requests of a batch, by `decode.c`: fp32 on a CPU."""

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyrhythm.kernels.compiling import COUNT, FLOAT, INT, POINTER, WIDEST_VECTOR, load_kernel

_MAX_REPEATS = 16  # query heads per key head: a task of the kernel has room for so many on every machine


class Span(NamedTuple):
    """A request's rows of the batch and its slots of the cache; each row's completion has a strip of slots."""

    first_row: int
    last_row: int
    prompt_start: int
    prompt_length: int
    strips_start: int
    strip_length: int
    own_length: int


SPAN = np.dtype([(name, np.int64) for name in Span._fields])


@dataclass(frozen=True)
class DecodingAttention:
    """The kernel for one shape of heads."""

    _library: ctypes.CDLL

    def attend(
        self, spans: np.ndarray, layer: int, queries_and_keys: Tensor, new_values: Tensor, cos: Tensor, sin: Tensor,
        cached_keys: Tensor, cached_values: Tensor, scale: float, out: Tensor,
    ) -> None:  # fmt: skip
        """Rotates and stores what is new, [rows, heads + kv heads, dim] and [rows, kv heads, dim], and attends.

        The cache is [layers, kv heads, slots, dim], the output [rows, heads * dim]; `sin` has its first half negated.
        """
        begin = layer * cached_keys.stride(0) * cached_keys.element_size()
        self._library.decode_attention(
            spans.ctypes.data, len(spans), queries_and_keys.data_ptr(), queries_and_keys.stride(0),
            new_values.data_ptr(), new_values.stride(0), cos.data_ptr(), sin.data_ptr(),
            cached_keys.data_ptr() + begin, cached_values.data_ptr() + begin, cached_keys.size(2), scale,
            torch.get_num_threads(), out.data_ptr(),
        )  # fmt: skip


def decoding_attention_for(num_kv_heads: int, repeats: int, head_dim: int) -> DecodingAttention | None:
    """The kernel for heads of this shape, where this machine has it."""
    if head_dim % WIDEST_VECTOR or repeats > _MAX_REPEATS:
        return None
    library = load_kernel(
        "decode", _declare, HEAD_DIM=head_dim, NUM_KV_HEADS=num_kv_heads, REPEATS=repeats, MAX_REPEATS=_MAX_REPEATS,
        SPAN_FIELDS=Span._fields,
    )  # fmt: skip
    return DecodingAttention(library) if library else None


def _declare(library: ctypes.CDLL) -> None:
    library.decode_attention.argtypes = [
        POINTER, COUNT, POINTER, COUNT, POINTER, COUNT, POINTER, POINTER, POINTER, POINTER, COUNT, FLOAT, INT, POINTER,
    ]  # fmt: skip
