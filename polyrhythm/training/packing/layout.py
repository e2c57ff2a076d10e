"""Where prompts and completions lie in one packed row of tokens, and which hidden state predicts which token.

A shared block is a prompt followed by all its completions, each continuing the prompt's positions:

    tokens      p0 p1 p2 | a0 | b0 b1        one block of two completions, a0 a1 and b0 b1 b2
    positions    0  1  2 |  3 |  3  4
    predicts        a0,b0  a1   b1 b2        the last prompt token predicts the first token of every completion

The last token of a completion is a target only: nothing attends to it and it predicts nothing, so the row leaves it out.
Unshared, every completion is a block of its own behind its own copy of the prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import torch
from torch import Tensor

from polyrhythm.algorithms.cost import block_tokens, tokens_in_row
from polyrhythm.training.packing.plan import Block, FlatSegments
from polyrhythm.training.packing.transfer import moved_together

PromptAndCompletions = tuple[Sequence[int], Sequence[Sequence[int]]]


@dataclass(frozen=True, eq=False)
class Layout:
    """One row of T tokens with N tokens to predict: those of the completions that count in the loss, in the row's order."""

    token_ids_T: Tensor
    position_ids_T: Tensor
    predictor_M: Tensor
    """Indices into T of the hidden states that predict something, each once: the last of a shared prompt predicts the
    first token of every completion, and meets the head once."""
    row_N: Tensor
    """Index into M of the hidden state that predicts target n."""
    target_N: Tensor
    group_N: Tensor
    """Index into the groups that `pack` was given. It stays on the host: so does what is found by it."""
    rollout_N: Tensor
    """Index of the completion within its group. On the host."""
    sequence_N: Tensor
    """Index of the completion within this row. A completion is never split over rows: sums over one are exact."""
    blocks: tuple[Block, ...]
    shared: bool
    segments: FlatSegments | None = None
    """What attention on an accelerator reads, there; a CPU's kernels read the blocks."""

    @property
    def predictor_N(self) -> Tensor:
        """Index into T of the hidden state that predicts target n."""
        return self.predictor_M[self.row_N]

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.numel()

    @property
    def num_targets(self) -> int:
        return self.target_N.numel()

    def to(self, device: torch.device) -> "Layout":
        """For a model on this device: what the model and the loss read is there, by one copy."""
        if device.type == "cpu":
            return self
        segments = FlatSegments.of(self.blocks)
        names = ("token_ids_T", "position_ids_T", "predictor_M", "row_N", "target_N", "sequence_N")
        *own, tables = moved_together([*(getattr(self, name) for name in names), segments.tables], device)
        return replace(self, **dict(zip(names, own, strict=True)), segments=replace(segments, tables=tables))


@dataclass(frozen=True)
class _Part:
    """What becomes one block: a prompt with some of its group's completions, by index."""

    group: int
    prompt: Sequence[int]
    completions: tuple[tuple[int, Sequence[int]], ...]

    @property
    def num_tokens(self) -> int:
        return block_tokens(len(self.prompt), (len(token_ids) for _, token_ids in self.completions))


def empty_row() -> Layout:
    """The shortest: of a pass that others wait for, and in which there is nothing to train on."""
    (row,) = pack([([0], [[0, 0]])], share_prompt=False, max_tokens=2)
    return row


def pack(
    groups: Sequence[PromptAndCompletions],
    *,
    share_prompt: bool,
    max_tokens: int,
    loss_masks: Sequence[Sequence[Sequence[bool]]] | None = None,
) -> list[Layout]:
    """Packs groups, in order and block by block, into as few rows of at most `max_tokens` as that order allows.

    A group too long for one row is split by completions, repeating the prompt. A single sequence longer than
    `max_tokens` gets a row of its own. `loss_masks` has the shape of the completions and says which of
    their tokens are targets; the others are in the row and attended to like any. Without it every token is a target.
    """
    parts = [part for index, group in enumerate(groups) for part in _parts(index, group, share_prompt, max_tokens)]
    return [_lay_out(row, share_prompt, loss_masks) for row in _rows(parts, max_tokens)]


def _parts(index: int, group: PromptAndCompletions, share_prompt: bool, max_tokens: int) -> Iterator[_Part]:
    prompt, completions = group
    if len(prompt) == 0:
        raise ValueError(f"group {index} has an empty prompt: nothing predicts the first token of its completions")
    if len(completions) == 0:
        raise ValueError(f"group {index} has no completions")
    for rollout, token_ids in enumerate(completions):
        if len(token_ids) == 0:
            raise ValueError(f"completion {rollout} of group {index} is empty: leave it out")
    room = max_tokens - len(prompt)
    taken: list[tuple[int, Sequence[int]]] = []
    used = 0
    for rollout, token_ids in enumerate(completions):
        needed = tokens_in_row(len(token_ids))
        if taken and (not share_prompt or (needed and used + needed > room)):
            yield _Part(index, prompt, tuple(taken))
            taken, used = [], 0
        taken.append((rollout, token_ids))
        used += needed
    yield _Part(index, prompt, tuple(taken))


def _rows(parts: Sequence[_Part], max_tokens: int) -> Iterator[list[_Part]]:
    row: list[_Part] = []
    used = 0
    for part in parts:
        if row and used + part.num_tokens > max_tokens:
            yield row
            row, used = [], 0
        row.append(part)
        used += part.num_tokens
    if row:
        yield row


def _lay_out(parts: Sequence[_Part], shared: bool, loss_masks: Sequence[Sequence[Sequence[bool]]] | None) -> Layout:
    token_ids: list[int] = []
    position_ids: list[int] = []
    predictors: list[int] = []
    targets: list[int] = []
    group_ids: list[int] = []
    rollout_ids: list[int] = []
    sequence_ids: list[int] = []
    num_sequences = 0
    blocks: list[Block] = []
    for part in parts:
        prompt_start, prompt_length = len(token_ids), len(part.prompt)
        token_ids += part.prompt
        position_ids += range(prompt_length)
        starts: list[int] = []
        lengths: list[int] = []
        for rollout, completion in part.completions:
            start, length = len(token_ids), tokens_in_row(len(completion))
            if length:
                starts.append(start)
                lengths.append(length)
            token_ids += completion[:length]
            position_ids += range(prompt_length, prompt_length + length)
            mask = loss_masks[part.group][rollout] if loss_masks else [True] * len(completion)
            num_targets = _num_targets(part.group, rollout, completion, mask)
            predictors += compress([prompt_start + prompt_length - 1, *range(start, start + length)], mask)
            targets += compress(completion, mask)
            group_ids += [part.group] * num_targets
            rollout_ids += [rollout] * num_targets
            sequence_ids += [num_sequences] * num_targets
            num_sequences += 1
        blocks.append(Block(prompt_start, prompt_length, tuple(starts), tuple(lengths)))
    predictor_M, row_N = torch.unique(torch.tensor(predictors), return_inverse=True)
    return Layout(
        token_ids_T=torch.tensor(token_ids),
        position_ids_T=torch.tensor(position_ids),
        predictor_M=predictor_M,
        row_N=row_N,
        target_N=torch.tensor(targets),
        group_N=torch.tensor(group_ids),
        rollout_N=torch.tensor(rollout_ids),
        sequence_N=torch.tensor(sequence_ids),
        blocks=tuple(blocks),
        shared=shared,
    )


def _num_targets(group: int, rollout: int, completion: Sequence[int], mask: Sequence[bool]) -> int:
    if len(mask) != len(completion):
        raise ValueError(f"a loss mask covers {len(mask)} tokens of {len(completion)}: one value per completion token")
    if not any(mask):
        raise ValueError(f"completion {rollout} of group {group} has no token in the loss: leave it out")
    return sum(mask)
