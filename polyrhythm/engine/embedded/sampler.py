"""Drawing tokens: a race of exponentials keyed by (seed, position, token), without noise for the whole vocabulary.

The winner of argmax(p_i / E_i) over independent exponentials E_i has distribution p. The race is run in two rounds,
first among blocks of the vocabulary by their total weight, then among the tokens of the winning block: the same
distribution exactly, with noise for a few hundred candidates instead of for all tokens. Nothing but the row's own
logits and key enters, so a token depends on neither the batch nor its order, and a small change of the weights changes
few tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK_SIZE = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Block numbers are drawn from their own stretch of the key space, away from the token ids.
_FIRST_BLOCK_ITEM = np.uint64(1 << 32)


@dataclass
class Draws:
    """What to draw: one entry per completion, each from one row of the logits; the filters are given per row."""

    rows: NDArray[np.int64]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.uint64]
    temperature_R: NDArray[np.float32]
    top_p_R: NDArray[np.float32]
    top_k_R: NDArray[np.int64]


class Sampler:
    """Draws tokens and their log-probabilities; keeps its vocabulary-wide buffer between calls."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.num_blocks = -(-vocab_size // _BLOCK_SIZE)
        self._buffer = torch.zeros(0)

    def draw(self, logits: Tensor, draws: Draws) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """A token for each entry of `draws`, and its log-probability before top-k and top-p. Overwrites the logits."""
        num_rows = len(draws.temperature_R)
        logits = logits[:num_rows]
        if np.any(draws.temperature_R != 1):
            logits.div_(torch.from_numpy(draws.temperature_R).to(logits.device).unsqueeze(1))
        weights = self._softmax(logits)
        blocks = weights.unflatten(1, (self.num_blocks, _BLOCK_SIZE))
        block_weights = blocks.sum(-1).cpu().numpy().astype(np.float64)
        # One long fp32 sum made the softmax; the sum of block sums is closer to the truth and corrects it.
        normalizer_R = block_weights.sum(-1)

        filtered = np.flatnonzero((draws.top_p_R < 1) | (draws.top_k_R > 0))
        if len(filtered):
            index = torch.from_numpy(filtered).to(weights.device)
            weights[index] = _filtered(weights[index], draws.top_p_R[filtered], draws.top_k_R[filtered])
            block_weights[filtered] = blocks[index].sum(-1).cpu().numpy()

        keys = _mix(_mix(draws.seeds) + draws.positions * _GOLDEN)
        block_items = np.arange(self.num_blocks, dtype=np.uint64) + _FIRST_BLOCK_ITEM
        block = np.argmax(block_weights[draws.rows] / _exponentials(keys, block_items), axis=1)
        rows = torch.from_numpy(draws.rows).to(weights.device)
        candidates = blocks[rows, torch.from_numpy(block).to(weights.device)].cpu().numpy().astype(np.float64)
        candidate_ids = (block * _BLOCK_SIZE)[:, None] + np.arange(_BLOCK_SIZE)
        winner = np.argmax(candidates / _exponentials(keys, candidate_ids.astype(np.uint64)), axis=1)
        # Filters only zero other tokens' weights, so a drawn token still has its own.
        drawn_weights = candidates[np.arange(len(winner)), winner]
        logprobs = np.log(drawn_weights / normalizer_R[draws.rows]).astype(np.float32)
        return block * _BLOCK_SIZE + winner, logprobs

    def _softmax(self, logits: Tensor) -> Tensor:
        """The softmax, with zeros up to a whole number of blocks."""
        if self.vocab_size == self.num_blocks * _BLOCK_SIZE:
            return torch.softmax(logits, -1)
        num_rows = logits.shape[0]
        if self._buffer.shape[0] < num_rows or self._buffer.device != logits.device:
            self._buffer = logits.new_zeros(num_rows, self.num_blocks * _BLOCK_SIZE)
        self._buffer[:num_rows, : self.vocab_size] = torch.softmax(logits, -1)
        return self._buffer[:num_rows]


def _filtered(weights: Tensor, top_p: NDArray[np.float32], top_k: NDArray[np.int64]) -> Tensor:
    """The weights with all tokens outside top-k, and then outside top-p of what is left, set to zero."""
    longest = int(top_k.max()) if np.all(top_k > 0) else weights.shape[1]
    kept = min(longest, weights.shape[1])
    ordered, order = torch.topk(weights, kept, dim=1)
    limit = torch.from_numpy(np.where(top_k > 0, top_k, kept)).to(weights.device).unsqueeze(1)
    ordered = ordered * (torch.arange(kept, device=weights.device) < limit)
    is_inside = _inside_top_p(ordered.cpu(), top_p).to(weights.device)
    ordered = ordered * is_inside
    return torch.zeros_like(weights).scatter_(1, order, ordered)


def _inside_top_p(ordered: Tensor, top_p: NDArray[np.float32]) -> Tensor:
    """On the host, because not every device has double precision."""
    before = ordered.double().cumsum(1) - ordered
    share = torch.from_numpy(top_p.astype(np.float64)).unsqueeze(1)
    return (before < share * ordered.double().sum(1, keepdim=True)) | (share >= 1)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64: neighbouring inputs give unrelated outputs."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _exponentials(keys: NDArray[np.uint64], items: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Exponential noise [key, item], a function of both numbers alone."""
    bits = _mix(keys[:, None] + (items + np.uint64(1)) * _GOLDEN)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(uniform)
