"""What attention does for a packed row: causal runs inside prompts and completions, and completions over their prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """A prompt and completions of it, contiguous in the row. Spans say who attends to what, nothing about the loss.

    A completion of one token has nothing in the row and is not among them.
    """

    prompt_start: int
    prompt_length: int
    completion_starts: tuple[int, ...]
    completion_lengths: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.prompt_start + self.prompt_length + sum(self.completion_lengths)


@dataclass(frozen=True)
class Run:
    """`count` neighbouring causal segments of equal `length`: one kernel call on a strided view."""

    start: int
    count: int
    length: int

    def of(self, row: Tensor) -> Tensor:
        """The segments of a [1, H, T, ...] row as [count, H, length, ...], without a copy."""
        _, per_head, per_token, *rest = row.stride()
        return row.as_strided(
            (self.count, row.size(1), self.length, *row.shape[3:]),
            (self.length * per_token, per_head, per_token, *rest),
            row.storage_offset() + self.start * per_token,
        )


@dataclass(frozen=True)
class Cross:
    """A block's completion tokens, all of which attend to its whole prompt.

    An even number of them makes two halves: the backward kernel gives whole key/value heads to threads, of which models
    have an odd number now and then.
    """

    queries: Run
    key_start: int
    num_keys: int

    def keys_of(self, row: Tensor) -> Tensor:
        """The prompt's part of a row, without a copy for each half."""
        return row.narrow(2, self.key_start, self.num_keys).expand(self.queries.count, -1, -1, -1)

    def add_to_keys_of(self, row: Tensor, gradient: Tensor) -> None:
        for half in gradient.split(1):
            row.narrow(2, self.key_start, self.num_keys).add_(half)


def _halves(start: int, length: int) -> Run:
    return Run(start, 1, length) if length % 2 else Run(start, 2, length // 2)


@dataclass(frozen=True, eq=False)
class FlatSegments:
    """A row as segments of one variable-length call, in which a block's first completion continues its prompt.

    Every other completion is a segment of its own whose keys are the prompt's, gathered again, and its own.
    """

    tables: Tensor
    """The keys' indices into the row, then the bounds of the segments' queries, then those of their keys."""
    query_stops: tuple[int, ...]
    key_stops: tuple[int, ...]

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> "FlatSegments":
        indices: list[Tensor] = []
        query_stops: list[int] = []
        key_stops: list[int] = []
        for block in blocks:
            prompt = torch.arange(block.prompt_start, block.prompt_start + block.prompt_length)
            own = list(zip(block.completion_starts, block.completion_lengths, strict=True))
            for start, length in own or [(block.stop, 0)]:
                indices += [prompt, torch.arange(start, start + length)]
                query_stops.append(start + length)
                key_stops.append((key_stops[-1] if key_stops else 0) + block.prompt_length + length)
        tables = torch.cat([*indices, torch.tensor([0, *query_stops]), torch.tensor([0, *key_stops])])
        return cls(tables, tuple(query_stops), tuple(key_stops))

    def to(self, device: torch.device) -> "FlatSegments":
        return replace(self, tables=self.tables.to(device))

    @cached_property
    def key_index_K(self) -> Tensor:
        return self.tables[: self.key_stops[-1]]

    @cached_property
    def query_bounds(self) -> Tensor:
        """0 and every stop, in the number format that variable-length attention takes."""
        return self.tables[self.key_stops[-1] :].chunk(2)[0].to(torch.int32)

    @cached_property
    def key_bounds(self) -> Tensor:
        return self.tables[self.key_stops[-1] :].chunk(2)[1].to(torch.int32)

    @cached_property
    def longest_query(self) -> int:
        return _longest(self.query_stops)

    @cached_property
    def longest_key(self) -> int:
        return _longest(self.key_stops)


def _longest(stops: Sequence[int]) -> int:
    return max(stop - start for start, stop in pairwise([0, *stops]))


class AttentionPlan:
    """The kernel calls that one layer makes for a row, and how many layers made them."""

    def __init__(self, blocks: Sequence[Block], segments: FlatSegments | None = None):
        self.blocks = tuple(blocks)
        self._segments = segments
        self.runs = _merge_equal_neighbours([segment for block in blocks for segment in causal_segments(block)])
        self.crosses = tuple(
            Cross(
                queries=_halves(block.completion_starts[0], sum(block.completion_lengths)),
                key_start=block.prompt_start,
                num_keys=block.prompt_length,
            )
            for block in blocks
            if len(block.completion_starts) > 1
        )
        self.longest_sequence = max(block.prompt_length + max(block.completion_lengths, default=0) for block in blocks)
        self.num_calls = 0

    def segments_on(self, device: torch.device) -> FlatSegments:
        """For all layers the same: made once, unless the row has brought them along."""
        if self._segments is None or self._segments.tables.device != device:
            self._segments = FlatSegments.of(self.blocks).to(device)
        return self._segments


def causal_segments(block: Block) -> list[tuple[int, int]]:
    """(start, length) of the block's causal segments; a lone completion simply continues its prompt."""
    if len(block.completion_starts) <= 1:
        return [(block.prompt_start, block.stop - block.prompt_start)]
    completions = zip(block.completion_starts, block.completion_lengths, strict=True)
    return [(block.prompt_start, block.prompt_length), *completions]


def _merge_equal_neighbours(segments: Sequence[tuple[int, int]]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for start, length in segments:
        if runs and runs[-1].length == length:
            runs[-1] = Run(runs[-1].start, runs[-1].count + 1, length)
        else:
            runs.append(Run(start, 1, length))
    return tuple(runs)


def span_of(start: int, length: int) -> slice:
    return slice(start, start + length)
