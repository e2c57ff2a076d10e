"""training.parallel = "replicate": every rank is a replica by itself, with the whole policy, its gradient and its moments.

That they stay equal is not assumed: at every step the others check their weights against those that the writer has
published.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from polyrhythm.training.parallel.channel import Channel, add_up
from polyrhythm.training.parallel.part import Part
from polyrhythm.training.policy.tri_model import TriModel
from polyrhythm.types import MicroBatch
from polyrhythm.weights.export import Rows, whole

T = TypeVar("T")


class WholeReplica:
    """A `Replica` of one rank. The first rank is the writer."""

    num_shards = 1
    is_leader = True
    has_updated = True

    def __init__(self, index: int = 0, num: int = 1, device: torch.device | None = None):
        self.index: int | str = index
        self.num = num
        self.writers = self.writers_aside = Channel()
        self._ranks = Channel(num, device)

    @property
    def is_writer(self) -> bool:
        return self.index == 0

    @property
    def is_alone(self) -> bool:
        return self.num == 1

    @property
    def writes_rows(self) -> bool:
        return self.is_writer

    @property
    def keeps_the_last_step(self) -> bool:
        return self.is_writer

    def hold(self, models: TriModel) -> None: ...

    def meet(self) -> None: ...

    def deal(self, round: Sequence[MicroBatch]) -> MicroBatch | None:
        return round[0] if round else None

    def num_passes(self, own: int) -> int:
        return own

    def begin_update(self) -> None: ...

    def agree(self, part: Part) -> list[Part] | None:
        return self.gather(part)

    def add_up(self, gradients: Sequence[Tensor], divisor: float) -> float | None:
        if self.num == 1:
            return divisor
        add_up(list(gradients))
        return sum(self.gather(divisor))  # on the host: not every device has double precision

    def end_pass(self) -> None: ...

    def appoint(self, duty: str) -> None: ...

    def has_done(self, duty: str) -> None: ...

    def gather(self, message: T, kind: type[T] | None = None) -> list[T]:
        return self._ranks.gather(message, kind)

    def rows_of(self, name: str, tensor: Tensor) -> Rows:
        return whole(name, tensor)
