"""Keys and values of running requests, in one preallocated block of token slots.

A request holds one contiguous range of slots: first its prompt, stored once, then a strip of equal length for each of
its completions. Contiguous strips let attention read plain views, without gathering and without masks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LayerViews = tuple[Tensor, ...]


class SlotAllocator:
    """Contiguous ranges of slots, first fit; freed neighbours become one range again."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free: list[tuple[int, int]] = [(0, num_slots)]

    @property
    def num_free(self) -> int:
        return sum(end - start for start, end in list(self._free))

    def allocate(self, num_slots: int) -> int | None:
        """The first slot of a free range of this length, or None if there is none now."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= num_slots:
                remainder = [(start + num_slots, end)] if end - start > num_slots else []
                self._free[index : index + 1] = remainder
                return start
        return None

    def free(self, start: int, num_slots: int) -> None:
        ranges = sorted([*self._free, (start, start + num_slots)])
        merged: list[tuple[int, int]] = []
        for first, last in ranges:
            if merged and merged[-1][1] == first:
                merged[-1] = (merged[-1][0], last)
            else:
                merged.append((first, last))
        self._free = merged


@dataclass(frozen=True)
class KvRange:
    """Where a request's keys and values lie: the prompt, then one strip per completion."""

    start: int
    prompt_length: int
    num_strips: int
    strip_length: int

    @property
    def num_slots(self) -> int:
        return slots_needed(self.prompt_length, self.num_strips, self.strip_length)

    def strip_start(self, strip: int) -> int:
        return self.start + self.prompt_length + strip * self.strip_length


def slots_needed(prompt_length: int, num_strips: int, strip_length: int) -> int:
    return prompt_length + num_strips * strip_length


class KvCache:
    """Keys and values as [layer, head, slot, dim]. One slot more takes what padding rows write.

    Readers get the views of all layers at once: attention then spends nothing on indexing.
    """

    def __init__(
        self, num_layers: int, num_slots: int, num_heads: int, head_dim: int, device: torch.device, *, value_dim: int = 0
    ):  # fmt: skip
        shape = (num_layers, num_heads, num_slots + 1)
        self.keys = torch.empty((*shape, head_dim), dtype=torch.float32, device=device)
        self.values = torch.empty((*shape, value_dim or head_dim), dtype=torch.float32, device=device)
        self.padding_slot, self.num_slots = num_slots, num_slots + 1
        self._keys_by_layer, self._values_by_layer = self.keys.unbind(0), self.values.unbind(0)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store [rows, heads, dim] keys and values, one slot per row."""
        self._keys_by_layer[layer].index_copy_(1, slots, keys.transpose(0, 1))
        self._values_by_layer[layer].index_copy_(1, slots, values.transpose(0, 1))

    def prompt(self, where: KvRange, length: int) -> tuple[LayerViews, LayerViews]:
        """Keys and values of the first `length` prompt tokens, for each layer [1, heads, length, dim]."""

        def views(stored: Tensor) -> LayerViews:
            return stored[:, :, where.start : where.start + length].unsqueeze(1).unbind(0)

        return views(self.keys), views(self.values)

    def strips(self, where: KvRange, num_strips: int, length: int) -> tuple[LayerViews, LayerViews]:
        """Keys and values of the first tokens of the first strips, for each layer [strips, heads, length, dim]."""
        first = where.strip_start(0)

        def views(stored: Tensor) -> LayerViews:
            block = stored[:, :, first : first + num_strips * where.strip_length]
            return block.unflatten(2, (num_strips, where.strip_length))[:, :, :, :length].transpose(1, 2).unbind(0)

        return views(self.keys), views(self.values)

    def move_strip(self, where: KvRange, source: int, target: int, length: int) -> None:
        """Copy a strip over another one, in all layers."""
        source_start, target_start = where.strip_start(source), where.strip_start(target)
        for stored in (self.keys, self.values):
            stored[:, :, target_start : target_start + length] = stored[:, :, source_start : source_start + length]
