"""A replica: one copy of the policy that takes groups and makes updates as one, whatever number of processes holds it.

Several replicas divide the groups of a step among them, each at its own pace. Losses are sums, so the gradient of a step
is the sum over replicas of what each has added up, and every replica makes the same update with the same numbers.

The processes of one replica are its shards. They train in rounds: their leader asks the conductor for groups and deals
a micro-batch to each, and all of them make the same number of passes, some of which are empty.

`replicate`, `shard_state` and `shard` beside this file are the kinds, by `training.parallel`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from torch import Tensor

from polyrhythm.training.parallel.channel import Channel
from polyrhythm.training.parallel.part import Part
from polyrhythm.types import MicroBatch
from polyrhythm.weights.export import Rows

if TYPE_CHECKING:
    from polyrhythm.training.policy.tri_model import TriModel

T = TypeVar("T")


class Replica(Protocol):
    """This process as a part of its replica. Methods are collective: all call the same ones in the same order."""

    @property
    def index(self) -> int | str:
        """Which of the replicas this is; under this number it asks the conductor for groups, elastic ranks under a name."""
        ...

    @property
    def num(self) -> int:
        """How many replicas divide the groups of a step among them."""
        ...

    @property
    def num_shards(self) -> int:
        """How many micro-batches make a round of this replica: one for each of its processes."""
        ...

    @property
    def is_leader(self) -> bool:
        """The process of the replica that asks the conductor."""
        ...

    @property
    def is_writer(self) -> bool:
        """One process speaks for all: it commits steps, and completes what is published and kept."""
        ...

    @property
    def writes_rows(self) -> bool:
        """Whether this process writes what it holds of the policy; otherwise it checks that against what others wrote."""
        ...

    @property
    def keeps_the_last_step(self) -> bool:
        """Whether this process saves the last finished step when the run ends in the middle of the next one.

        It must have all of it: of several writers one that goes leaves the others without its rows.
        """
        ...

    @property
    def writers(self) -> Channel:
        """Those who write the rows of one copy of the policy together, the writer first. Used by them alone."""
        ...

    @property
    def writers_aside(self) -> Channel:
        """The same processes once more, for a thread that writes while this one trains."""
        ...

    @property
    def is_alone(self) -> bool:
        """No other process takes part in an update: there is nothing to add up."""
        ...

    def hold(self, models: "TriModel") -> None:
        """Keep of the models what this process is to hold. Once, before there is an optimizer."""
        ...

    def meet(self) -> None:
        """Until all shards of the replica are here."""
        ...

    def deal(self, round: Sequence[MicroBatch]) -> MicroBatch | None:
        """What this shard trains on in the round that the leader gives, one micro-batch for each; None after the last round."""
        ...

    def num_passes(self, own: int) -> int:
        """The largest number of passes that a shard of this replica has to make now."""
        ...

    def begin_update(self) -> None:
        """From here to `add_up` the policy is used by passes."""
        ...

    def agree(self, part: Part) -> list[Part] | None:
        """What every process says of its part of the update, in their order; None: there is more to train on first."""
        ...

    def add_up(self, gradients: Sequence[Tensor], divisor: float) -> float | None:
        """Put the sum over all processes into each gradient, or into the rows of it that are here; the sum of the divisors.

        None if it has failed because an elastic rank is lost: the gradients are then as they were.
        """
        ...

    def end_pass(self) -> None:
        """Whatever a pass outside of an update has brought together of the policy is let go: its rows may change now."""
        ...

    @property
    def has_updated(self) -> bool:
        """Whether the last `agree` and `add_up` have come to an update."""
        ...

    def appoint(self, duty: str) -> None:
        """Settle who the writer is before it does something for all, such as publishing a version.

        If that is an elastic rank which is then lost, until another has done it: this process, if it is the next.
        """
        ...

    def has_done(self, duty: str) -> None:
        """The writer has done it: nobody else will be appointed."""
        ...

    def gather(self, message: T, kind: type[T] | None = None) -> list[T]:
        """What every process has to say, in their order."""
        ...

    def rows_of(self, name: str, tensor: Tensor) -> Rows:
        """What this process holds of a tensor of the policy or of the optimizer."""
        ...
