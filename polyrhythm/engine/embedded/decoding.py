"""Attention of one decoding step: every running completion over its request's prompt and its own tokens.

Two forms of the same function: a compiled kernel for the CPU, and torch operators for any device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from polyrhythm.engine.embedded.attention import attend, merge_rows
from polyrhythm.engine.embedded.batch import DecodeBatch
from polyrhythm.engine.embedded.kv_cache import KvCache
from polyrhythm.kernels.decoding_attention import DecodingAttention, decoding_attention_for

# Matrix kernels for fewer rows than this round differently, so no product is ever done with fewer.
_MIN_QUERIES = 16

LayerAttention = Callable[[int, Tensor, Tensor], Tensor]
"""Layer, queries and keys that are not rotated yet [rows, heads + kv heads, dim], values [rows, kv heads, dim]."""


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    dim: int
    scale: float

    @property
    def repeats(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class Rotation:
    """Rotary position embedding of some rows, in the half-split order of Llama."""

    cos: Tensor
    sin: Tensor
    """Both [rows, 1, dim]; the first half of `sin` is negated."""

    def __call__(self, values: Tensor) -> Tensor:
        first, second = values.chunk(2, -1)
        return (values * self.cos).addcmul_(torch.cat((second, first), -1), self.sin)


class CompiledDecoding:
    """The compiled kernel: one call a layer for all requests."""

    def __init__(self, heads: Heads, kernel: DecodingAttention):
        self._heads = heads
        self._kernel = kernel

    def __call__(self, cache: KvCache, batch: DecodeBatch, rotation: Rotation) -> LayerAttention:
        heads, kernel = self._heads, self._kernel
        output = cache.keys.new_zeros(batch.num_padded_rows, heads.num_heads * heads.dim)
        cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()

        def attention(layer: int, queries_and_keys: Tensor, new_values: Tensor) -> Tensor:
            kernel.attend(
                batch.spans,
                layer,
                queries_and_keys,
                new_values,
                cos,
                sin,
                cache.keys,
                cache.values,
                heads.scale,
                output,
            )
            return output

        return attention


class TorchDecoding:
    """The same with two attention calls for each request and layer."""

    def __init__(self, heads: Heads):
        self._heads = heads

    def __call__(self, cache: KvCache, batch: DecodeBatch, rotation: Rotation) -> LayerAttention:
        heads, num_rows = self._heads, batch.num_padded_rows
        window = -(-_MIN_QUERIES // heads.repeats)
        output = torch.zeros(num_rows, heads.num_kv_heads, heads.repeats, heads.dim, device=rotation.cos.device)
        slots = batch.slots()
        views = []
        for where, span in zip(batch.where, batch.spans.tolist(), strict=True):
            first, last, own_length = span[0], span[1], span[-1]
            prompt = cache.prompt(where, where.prompt_length)
            own = cache.strips(where, last - first, own_length)
            views.append((first, last, *prompt, *own))

        def attention(layer: int, queries_and_keys: Tensor, new_values: Tensor) -> Tensor:
            queries, keys = rotation(queries_and_keys).split((heads.num_heads, heads.num_kv_heads), 1)
            cache.write(layer, slots, keys, new_values)
            folded = queries.unflatten(1, (heads.num_kv_heads, heads.repeats)).transpose(0, 1).contiguous()
            by_row = folded.transpose(0, 1)
            prompt_parts, own_parts = [], []
            for first_row, last_row, prompt_keys, prompt_values, own_keys, own_values in views:
                first = min(first_row, max(num_rows - window, 0))
                last = max(last_row, first + window)
                shared_queries = folded[:, first:last].flatten(1, 2).unsqueeze(0)
                prompt = attend(
                    shared_queries, prompt_keys[layer], prompt_values[layer], scale=heads.scale, causal=False
                )
                mine = slice(first_row - first, last_row - first)
                prompt_parts.append(
                    [part[0].unflatten(1, (-1, heads.repeats)).transpose(0, 1)[mine] for part in prompt]
                )
                own_queries = by_row[first_row:last_row]
                own_parts.append(
                    attend(own_queries, own_keys[layer], own_values[layer], scale=heads.scale, causal=False)
                )
            merge_rows(own_parts, prompt_parts, out=output[: batch.num_rows])
            return output.flatten(1)

        return attention


def decoding_for(heads: Heads, device: torch.device) -> CompiledDecoding | TorchDecoding:
    """The fastest form that this machine has."""
    if device.type == "cpu" and (kernel := decoding_attention_for(heads.num_kv_heads, heads.repeats, heads.dim)):
        return CompiledDecoding(heads, kernel)
    return TorchDecoding(heads)
