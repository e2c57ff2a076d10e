"""training.parallel = "shard_state": weights are whole within a step, what the optimizer keeps is divided among all ranks.

Every rank is a replica by itself and takes groups by demand: between the beginning of an update and its end no rank waits for
another. At the end one empty pass sums the gradients, each rank moves its own rows, and the next update brings the
rows together.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from polyrhythm.training.packing.layout import empty_row
from polyrhythm.training.parallel.channel import Channel, aside
from polyrhythm.training.parallel.part import Part
from polyrhythm.training.parallel.sharding import held_rows, let_go, shard_model
from polyrhythm.training.policy.tri_model import TriModel
from polyrhythm.types import MicroBatch
from polyrhythm.weights.export import Rows

T = TypeVar("T")


class ShardedState:
    """A `Replica` of one rank which owns some rows of every tensor, and has all of them during an update."""

    num_shards = 1
    is_leader = True
    is_alone = False
    has_updated = True
    writes_rows = True
    keeps_the_last_step = False

    def __init__(self, rank: int, num_ranks: int, device: torch.device, *, offload: bool = False):
        self.index = rank
        self.num = num_ranks
        self._device = device
        self._offload = offload
        self.writers = self._ranks = Channel(num_ranks, device)
        self.writers_aside = aside([range(num_ranks)])
        self._mesh = init_device_mesh(device.type, (num_ranks,))

    @property
    def is_writer(self) -> bool:
        return self.index == 0

    def hold(self, models: TriModel) -> None:
        """Old policy and reference have nothing to update: to cut them would save nothing in an update."""
        self._models, self._policy = models, models.policy
        shard_model(models.policy, self._mesh, reshard=False, dtype=models.dtype, offload=self._offload)
        self._sync(False)

    def meet(self) -> None: ...

    def deal(self, round: Sequence[MicroBatch]) -> MicroBatch | None:
        return round[0] if round else None

    def num_passes(self, own: int) -> int:
        return own

    @torch.no_grad()
    def begin_update(self) -> None:
        self._models.score(empty_row().to(self._device))

    def agree(self, part: Part) -> list[Part] | None:
        return self.gather(part)

    def add_up(self, gradients: Sequence[Tensor], divisor: float) -> float:
        self._sync(True)
        self._models.pass_without_gradient(empty_row().to(self._device))
        self._sync(False)
        return sum(self.gather(divisor))

    def end_pass(self) -> None:
        let_go(self._policy)

    def appoint(self, duty: str) -> None: ...

    def has_done(self, duty: str) -> None: ...

    def gather(self, message: T, kind: type[T] | None = None) -> list[T]:
        return self._ranks.gather(message, kind)

    def rows_of(self, name: str, tensor: Tensor) -> Rows:
        return held_rows(name, tensor)

    def _sync(self, wanted: bool) -> None:
        """Whether a backward pass sums over ranks and leaves rows, or adds to what is whole here."""
        self._policy.set_requires_gradient_sync(wanted)  # pyright: ignore  # FSDPModule
        self._policy.set_reshard_after_backward(wanted)  # pyright: ignore
