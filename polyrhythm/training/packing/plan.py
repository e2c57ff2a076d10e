"""What attention does for a packed row: causal runs inside prompts and completions, and completions over their prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from polyrhythm.training.packing.layout import Block


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


class AttentionPlan:
    """The kernel calls that one layer makes for a row, and how many layers made them."""

    def __init__(self, blocks: Sequence[Block]):
        self.blocks = tuple(blocks)
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
