"""training.parallel = "shard": weights, gradients and moments are divided among the ranks of a replica (FSDP2).

A layer's weights are brought together while it computes, so the shards of a replica run the same passes at the same time:
rounds, in which each has a micro-batch of its own or an empty one. Several replicas (`training.ranks_per_replica`) take
groups by demand, and their sums are added up row by row at the end of an update.
"""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from polyrhythm.errors import UserError
from polyrhythm.training.packing.scoring import recurrent_layers
from polyrhythm.training.parallel.channel import Channel, add_up, aside
from polyrhythm.training.parallel.part import Part
from polyrhythm.training.parallel.sharding import held_rows, let_go, shard_model
from polyrhythm.training.policy.tri_model import TriModel
from polyrhythm.types import MicroBatch
from polyrhythm.weights.export import Rows

T = TypeVar("T")


class Shard:
    """One process of a `Replica` that is divided among `ranks_per_replica` of them; 0: among all."""

    is_alone = False
    has_updated = True

    def __init__(
        self, rank: int, num_ranks: int, device: torch.device, *, ranks_per_replica: int = 0, offload: bool = False
    ):  # fmt: skip
        self.num_shards = ranks_per_replica or num_ranks
        self.num = num_ranks // self.num_shards
        self.index, self._shard = divmod(rank, self.num_shards)
        self._offload = offload
        mesh = init_device_mesh(device.type, (self.num, self.num_shards), mesh_dim_names=("replica", "shard"))
        self._mesh = mesh["shard"]
        self._others: dist.ProcessGroup = mesh.get_group("replica")
        self.writers = self._shards = Channel(self.num_shards, device, mesh.get_group("shard"))
        self._ranks = Channel(num_ranks, device)
        size = self.num_shards
        self.writers_aside = aside([range(first, first + size) for first in range(0, num_ranks, size)])

    @property
    def is_leader(self) -> bool:
        return self._shard == 0

    @property
    def is_writer(self) -> bool:
        return self.is_leader and self.index == 0

    @property
    def keeps_the_last_step(self) -> bool:
        return self.is_writer and self.num_shards == 1

    @property
    def writes_rows(self) -> bool:
        return self.index == 0

    def hold(self, models: TriModel) -> None:
        if recurrent := recurrent_layers(models.policy):
            raise UserError(
                f'training.parallel="shard" does not go with layers of type {", ".join(recurrent)}: each sequence is a pass of '
                'its own, and shards make the same number of passes; use "shard_state" or "replicate"'
            )
        self._policy = models.policy
        for model in models.all():
            shard_model(model, self._mesh, reshard=True, dtype=models.dtype, offload=self._offload)

    def meet(self) -> None:
        self._shards.wait_for_all()

    def deal(self, round: Sequence[MicroBatch]) -> MicroBatch | None:
        parts = self._shards.from_first([msgspec.msgpack.encode(micro_batch) for micro_batch in round])
        return msgspec.msgpack.decode(parts[self._shard], type=MicroBatch) if parts else None

    def num_passes(self, own: int) -> int:
        return self._shards.largest(own)

    def begin_update(self) -> None: ...

    def agree(self, part: Part) -> list[Part] | None:
        return self.gather(part)

    def add_up(self, gradients: Sequence[Tensor], divisor: float) -> float:
        """Passes have summed over the shards already; the same rows of all replicas are left."""
        if self.num > 1:
            rows = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in gradients]
            add_up([tensor for tensor in rows if tensor.numel()], self._others)
        return sum(self.gather(divisor))

    def end_pass(self) -> None:
        let_go(self._policy)

    def appoint(self, duty: str) -> None: ...

    def has_done(self, duty: str) -> None: ...

    def gather(self, message: T, kind: type[T] | None = None) -> list[T]:
        return self._ranks.gather(message, kind)

    def rows_of(self, name: str, tensor: Tensor) -> Rows:
        return held_rows(name, tensor)
