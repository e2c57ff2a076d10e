"""The decoding batch: which row decodes which completion. Rebuilt when requests join or leave, else moved on."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyrhythm.engine.embedded.kv_cache import KvRange
from polyrhythm.engine.embedded.sampler import Draws
from polyrhythm.engine.embedded.scheduler import ActiveRequest
from polyrhythm.kernels.decoding_attention import SPAN, Span

_MIN_ROWS = 16
_ROW_MULTIPLE = 8


def padded_rows(num_rows: int) -> int:
    """How many rows a matrix product is done with: a row's bits then do not depend on how many others there are."""
    return max(_MIN_ROWS, -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE)


class DecodeBatch:
    """Token and position of each row, as tensors, and the span of each request; padding rows come last.

    All unfinished completions of a request have the same length.
    """

    def __init__(self, requests: Sequence[ActiveRequest], padding_slot: int, device: torch.device):
        self.requests = list(requests)
        self.where = [request.where for request in requests]
        self.num_rows = sum(request.num_active for request in requests)
        self.num_padded_rows = padded_rows(self.num_rows)
        self.spans = np.empty(len(requests), SPAN)
        token_ids = np.zeros(self.num_padded_rows, np.int64)
        positions = np.zeros(self.num_padded_rows, np.int64)
        first = 0
        for index, request in enumerate(requests):
            last = first + request.num_active
            where, length = request.where, request.num_generated
            token_ids[first:last] = request.last_tokens()
            positions[first:last] = where.prompt_length + length - 1
            self.spans[index] = Span(
                first_row=first, last_row=last, prompt_start=where.start, prompt_length=where.prompt_length,
                strips_start=where.strip_start(0), strip_length=where.strip_length, own_length=length,
            )  # fmt: skip
            first = last
        self.token_ids = torch.from_numpy(token_ids).to(device)
        self.positions = torch.from_numpy(positions).to(device)
        self._padding_slot = padding_slot
        self._device = device

    def slots(self) -> Tensor:
        """Where each row writes its keys and values; padding rows write to the padding slot."""
        slots = np.full(self.num_padded_rows, self._padding_slot, np.int64)
        for span in self.spans:
            strips = np.arange(span["last_row"] - span["first_row"]) * span["strip_length"]
            slots[span["first_row"] : span["last_row"]] = span["strips_start"] + strips + span["own_length"] - 1
        return torch.from_numpy(slots).to(self._device)

    def advance(self, tokens: np.ndarray) -> None:
        """Go on with the tokens just drawn; nobody has joined or left."""
        self.token_ids[: self.num_rows] = torch.from_numpy(tokens).to(self._device)
        self.positions[: self.num_rows] += 1
        self.spans["own_length"] += 1


class PromptRows(NamedTuple):
    """A chunk of a prompt as rows of a pass, padding rows last: their tokens, positions, and slots of the cache."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor


def prompt_rows(
    token_ids: list[int], start: int, where: KvRange, *, context_length: int, padding_slot: int, device: torch.device
) -> PromptRows:
    """The prompt's tokens from position `start` on; padding rows write to the padding slot."""
    num_tokens = len(token_ids)
    num_rows = padded_rows(num_tokens)
    slots = torch.arange(where.start + start, where.start + start + num_rows, device=device)
    slots[num_tokens:] = padding_slot
    return PromptRows(
        token_ids=torch.tensor(token_ids + [0] * (num_rows - num_tokens), device=device),
        positions=torch.arange(start, start + num_rows, device=device).clamp_(max=context_length - 1),
        slots=slots,
    )


def draws_of(running: Sequence[ActiveRequest], joining: Sequence[ActiveRequest]) -> Draws:
    """What to draw next: a row of logits per completion of the running requests, then one per joining request."""
    num_running = sum(request.num_active for request in running)
    rows_of_joining = [np.full(request.num_active, num_running + index) for index, request in enumerate(joining)]
    requests = [*running, *joining]
    samplings = [request.request.sampling for request in requests]
    rows_per_request = [request.num_active for request in running] + [1] * len(joining)
    # Greedy decoding, temperature 0, is drawing from the single most likely token.
    greedy = [sampling.temperature == 0 for sampling in samplings]
    temperatures = [1.0 if is_greedy else s.temperature for s, is_greedy in zip(samplings, greedy, strict=True)]
    top_ks = [1 if is_greedy else s.top_k for s, is_greedy in zip(samplings, greedy, strict=True)]
    return Draws(
        rows=np.concatenate([np.arange(num_running), *rows_of_joining]),
        seeds=np.concatenate([request.active_seeds() for request in requests]),
        positions=np.concatenate([np.full(r.num_active, r.num_generated, np.uint64) for r in requests]),
        temperature_R=np.repeat(np.array(temperatures, np.float32), rows_per_request),
        top_p_R=np.repeat(np.array([s.top_p for s in samplings], np.float32), rows_per_request),
        top_k_R=np.repeat(np.array(top_ks, np.int64), rows_per_request),
    )
