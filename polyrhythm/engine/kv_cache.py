"""Keys and values of running requests, in one preallocated block of token slots.

A request holds one contiguous range of slots: first its prompt, stored once, then a strip of equal length for each of
its completions. Contiguous strips let attention read plain views, without gathering and without masks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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
    """The storage: [layer, slot, key or value, head, dim]. One slot more takes what padding rows write."""

    def __init__(self, num_layers: int, num_slots: int, num_heads: int, head_dim: int, device: torch.device):
        shape = (num_layers, num_slots + 1, 2, num_heads, head_dim)
        self.storage = torch.empty(shape, dtype=torch.float32, device=device)
        self.padding_slot = num_slots
        # An unwritten value may be NaN, and padding rows are attended over: let them see numbers.
        self.storage[:, self.padding_slot] = 0

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store [rows, heads, dim] keys and values, one slot per row."""
        self.storage[layer, :, 0].index_copy_(0, slots, keys)
        self.storage[layer, :, 1].index_copy_(0, slots, values)

    def prompt(self, layer: int, where: KvRange, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` prompt tokens: [1, heads, length, dim]."""
        block = self.storage[layer, where.start : where.start + length].transpose(0, 2)
        return block[:, 0].unsqueeze(0), block[:, 1].unsqueeze(0)

    def strips(self, layer: int, where: KvRange, num_strips: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first tokens of the first strips: [strips, heads, length, dim]."""
        first = where.strip_start(0)
        block = self.storage[layer, first : first + num_strips * where.strip_length]
        block = block.unflatten(0, (num_strips, where.strip_length))[:, :length]
        return block[:, :, 0].transpose(1, 2), block[:, :, 1].transpose(1, 2)

    def move_strip(self, where: KvRange, source: int, target: int, length: int) -> None:
        """Copy a strip over another one, in all layers."""
        source_start, target_start = where.strip_start(source), where.strip_start(target)
        self.storage[:, target_start : target_start + length] = self.storage[:, source_start : source_start + length]
