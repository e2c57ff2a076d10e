"""training.parallel = "replicate": every rank is a replica by itself, with the whole policy, its gradient and its moments.

That they stay equal is not assumed: at every step the others check their weights against those that the writer has
published.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from polyrhythm.training.parallel.channel import Channel, add_up
from polyrhythm.types import MicroBatch

T = TypeVar("T")


class WholeReplica:
    """A `Replica` of one rank. The first rank is the writer."""

    def __init__(self, index: int = 0, num: int = 1, device: torch.device | None = None):
        self.index = index
        self.num = num
        self._ranks = Channel(num, device)

    @property
    def is_writer(self) -> bool:
        return self.index == 0

    @property
    def is_alone(self) -> bool:
        return self.num == 1

    def share(self, micro_batch: MicroBatch | None) -> MicroBatch | None:
        return micro_batch

    def add_up(self, gradients: Sequence[Tensor], divisor: float) -> float:
        if self.num == 1:
            return divisor
        add_up(list(gradients))
        return sum(self.gather(divisor))  # on the host: not every device has double precision

    def gather(self, message: T) -> list[T]:
        return self._ranks.gather(message)
