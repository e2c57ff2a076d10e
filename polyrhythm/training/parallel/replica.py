"""A replica: one copy of the policy that takes groups and makes updates as one, whatever number of processes holds it.

Several replicas divide the groups of a step among them, each at its own pace. Losses are sums, so the gradient of a step
is the sum over replicas of what each has added up, and every replica makes the same update with the same numbers.

Today a replica is one rank (`ranks`). A policy that is sharded over several ranks will be one replica too: its shards are
shown the same micro-batches by `share`, so that they run the same passes, and `add_up` reduces over shards and replicas.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from polyrhythm.types import MicroBatch

T = TypeVar("T")


class Replica(Protocol):
    """This process as a part of its replica. Methods are collective: all call the same ones in the same order."""

    @property
    def index(self) -> int:
        """Which of the replicas this is; under this number it asks the conductor for groups."""
        ...

    @property
    def num(self) -> int:
        """How many replicas divide the groups of a step among them."""
        ...

    @property
    def is_writer(self) -> bool:
        """One process speaks for all: it publishes weights, commits steps and writes checkpoints."""
        ...

    @property
    def is_alone(self) -> bool:
        """No other process takes part in an update: there is nothing to add up."""
        ...

    def share(self, micro_batch: MicroBatch | None) -> MicroBatch | None:
        """What this replica trains on next, the same for all its shards; None at the end of the update.

        The shard that asks the conductor gives what it got, the others give None.
        """
        ...

    def add_up(self, gradients: Sequence[Tensor], divisor: float) -> float:
        """Put the sum over all replicas into each gradient, the same bits everywhere; the sum of the divisors."""
        ...

    def gather(self, message: T) -> list[T]:
        """What every replica has to say, in their order."""
        ...
