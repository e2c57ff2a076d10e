"""Which part of a mixed task comes at which position: exactly by weight, in an order drawn from the seed. Pure."""

import random
from typing import NamedTuple

from polyrhythm.errors import UserError

BLOCK = 1000
"""In so many problems each part has its share; only the order differs from block to block."""


class Place(NamedTuple):
    part: int
    nth: int
    """How many problems of this part came before."""


class Mixture:
    """Position to part, for any position at once: nothing has to be counted up to it."""

    def __init__(self, weights: list[float], seed: int) -> None:
        self._counts = share_out(weights)
        self._seed = seed
        self._block = -1
        self._places: list[Place] = []

    def at(self, position: int) -> Place:
        block, offset = divmod(position, BLOCK)
        if block != self._block:
            self._block, self._places = block, self._lay_out(block)
        return self._places[offset]

    def taken(self, cursor: int) -> list[int]:
        """How many problems of each part are among the first `cursor`."""
        whole, rest = divmod(cursor, BLOCK)
        among_rest = [place.part for place in self._lay_out(whole)[:rest]]
        return [whole * count + among_rest.count(part) for part, count in enumerate(self._counts)]

    def _lay_out(self, block: int) -> list[Place]:
        parts = [part for part, count in enumerate(self._counts) for _ in range(count)]
        random.Random(f"{self._seed}/mixture/{block}").shuffle(parts)
        before = [block * count for count in self._counts]
        places = []
        for part in parts:
            places.append(Place(part, before[part]))
            before[part] += 1
        return places


def share_out(weights: list[float]) -> list[int]:
    """How many problems of a block each part has: by largest remainder, so that they add up."""
    if not all(0 < weight < float("inf") for weight in weights):
        raise UserError(f"task.options.weights={weights} must all be above 0: leave out what should not be trained on")
    shares = [weight / sum(weights) * BLOCK for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda part: counts[part] - shares[part])
    for part in by_remainder[: BLOCK - sum(counts)]:
        counts[part] += 1
    if not all(counts):
        raise UserError(f"task.options.weights={weights}: {min(weights)} is less than one problem in {BLOCK}: raise it")
    return counts
