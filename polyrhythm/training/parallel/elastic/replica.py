"""training.elastic: ranks that come and go. Each holds the whole policy, and an update is a transaction of those that are there.

A rank keeps its own sum until the update is committed: what the ranks add up is a copy, which is dropped when one of them
is lost. Whoever is left takes the groups of the lost one, and they add up again in the next epoch, in a group of its own.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import blake3
import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.errors import AnotherFailed, RunError
from polyrhythm.messages import RankDecision, Setup
from polyrhythm.observe.activity import Activity
from polyrhythm.observe.recorder import ActivityRecorder
from polyrhythm.training.parallel.elastic.place import ElasticPlace, EpochEnded
from polyrhythm.training.parallel.meeting import ConductorLine, ConductorStore, bind_to_route
from polyrhythm.training.parallel.part import Part
from polyrhythm.training.parallel.replicate import WholeReplica
from polyrhythm.weights.store import can_be_stored

BUCKET_NUMBERS = 8 * 2**20
"""Gradients are added up in buckets of so many numbers."""
MAX_GROUP_DEADLINE_S = 30.0
POLL_S = 0.002
MAX_CAUSE_CHARS = 200

T = TypeVar("T")
State = Mapping[str, Tensor]
log = logging.getLogger(__name__)


class ElasticReplica(WholeReplica):
    """One rank of those that are there. `keep_state` and `restore_state` give and take all that an update needs besides weights."""

    def __init__(self, url: str, credential: str, place: ElasticPlace, lease_s: float, recorder: ActivityRecorder):
        super().__init__()
        self.index = place.member
        self.place = place
        self._is_writer = False
        self.has_updated = True
        """Whether the last update was made; if not, there may be more to train on before it is."""
        self.keep_state: Callable[[], State] = dict
        self.restore_state: Callable[[State], None] = lambda state: None
        self._line = ConductorLine(url, credential)
        self._deadline = timedelta(seconds=min(MAX_GROUP_DEADLINE_S, lease_s / 2))
        self._recorder = recorder
        self._decision = RankDecision("wait")
        self._groups: list[_Group] = []
        """To take one apart waits for its threads, and they may wait for who is gone: not in the middle of an update."""
        bind_to_route(url)

    @property
    def is_writer(self) -> bool:
        return self._is_writer

    @property
    def keeps_the_last_step(self) -> bool:
        """Who has published it may be lost by now: then it is the next."""
        return self.place.is_first

    @property
    def is_alone(self) -> bool:
        return False

    def appoint(self, duty: str) -> None:
        self._is_writer = self.place.has_duty(duty)

    def has_done(self, duty: str) -> None:
        self.place.has_done(duty)

    def agree(self, part: Part) -> list[Part] | None:
        self._decision = self.place.ready(part.positions, msgspec.msgpack.encode(part))
        self.has_updated = False
        if self._decision.what == "more":
            return None
        return [msgspec.msgpack.decode(said, type=Part) for said in self._decision.said]

    def gather(self, message: T, kind: type[T] | None = None) -> list[T]:
        """Outside of updates nobody waits for others."""
        return [message]

    def add_up(self, gradients: Sequence[Tensor], divisor: float) -> float | None:
        decision = self._decision
        total = torch.cat([gradient.detach().reshape(-1).to("cpu", torch.float32) for gradient in gradients])
        try:
            divisor = self._add_up(total, divisor, decision)
        except (EpochEnded, RuntimeError) as error:
            log.warning("epoch %d: %s", decision.epoch, error)
            self.place.failed(decision.epoch, str(error)[:MAX_CAUSE_CHARS])
            return None
        if not self.place.reduced(decision.epoch, _digest(total, divisor)):
            return None
        for gradient, part in zip(gradients, total.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        self.has_updated = True
        return divisor

    def _add_up(self, total: Tensor, divisor: float, decision: RankDecision) -> float:
        """Put the sums over all members into `total`; who lacks the optimizer's state has it then."""
        if len(decision.members) == 1:
            return divisor
        group = _Group(self._line, self.place, decision, self._deadline)
        self._groups.append(group)
        self._recorder.moment(Activity.REDUCE)
        for bucket in total.split(BUCKET_NUMBERS):
            group.add_up(bucket)
            self._recorder.moment(Activity.REDUCE)
        divisors = torch.zeros(len(decision.members), dtype=torch.float64)
        divisors[group.index] = divisor
        group.add_up(divisors)
        if decision.without_state:
            source = next(i for i, member in enumerate(decision.members) if member not in decision.without_state)
            state = group.send(self.keep_state() if group.index == source else {}, source)
            if self.place.member in decision.without_state:
                self.restore_state(state)
        self._groups.remove(group)
        return sum(divisors.tolist())


def join_elastic(
    url: str, credential: str, name: str, lease_s: float, recorder: ActivityRecorder, setup: Setup
) -> ElasticReplica:  # fmt: skip
    """Become one of the ranks of the run whose conductor is at `url`, in its beginning or later."""
    place = ElasticPlace(url, credential, name, lease_s)
    place.join(setup)
    return ElasticReplica(url, credential, place, lease_s, recorder)


class _Group:
    """The members of one epoch, in their order. Every operation ends with the epoch, whatever a lost member does to gloo."""

    def __init__(self, line: ConductorLine, place: ElasticPlace, decision: RankDecision, deadline: timedelta):
        self.index = decision.members.index(place.member)
        self._epoch, self._place = decision.epoch, place
        os.environ["TORCH_GLOO_LAZY_INIT"] = "0"  # a connection that is made later waits for ever for who has gone
        store = ConductorStore(line, decision.epoch, deadline)
        try:
            self._group = dist.ProcessGroupGloo(store, self.index, len(decision.members), deadline)  # pyright: ignore
        except AnotherFailed:
            raise
        except RunError as error:  # the conductor's word that the epoch is over
            raise EpochEnded(str(error)) from None

    def add_up(self, tensor: Tensor) -> None:
        self._wait(self._group.allreduce([tensor]))  # pyright: ignore

    def send(self, state: State, source: int) -> dict[str, Tensor]:
        """What the member at `source` gives, at every member."""
        table = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in state.items()]
        said = torch.frombuffer(bytearray(msgspec.msgpack.encode(table)), dtype=torch.uint8)
        length = torch.tensor([len(said)])
        self._broadcast(length, source)
        said = said if self.index == source else torch.zeros(int(length), dtype=torch.uint8)
        self._broadcast(said, source)
        received = {}
        for name, dtype, shape in msgspec.msgpack.decode(said.numpy().tobytes(), type=list[tuple[str, str, list[int]]]):
            tensor = state[name].cpu().contiguous() if self.index == source else torch.empty(shape, dtype=_dtype(dtype))
            self._broadcast(tensor.view(-1).view(torch.uint8), source)
            received[name] = tensor
        return received

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._wait(self._group.broadcast([tensor], options))  # pyright: ignore

    def _wait(self, work: dist.Work) -> None:
        while not work.is_completed():
            self._place.check(self._epoch)
            time.sleep(POLL_S)
        work.wait()  # it has ended: this raises what has gone wrong


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not can_be_stored(torch.empty(0, dtype=dtype)):
        raise RuntimeError(f"a rank has sent a tensor of {name!r}")
    return dtype


def _digest(total: Tensor, divisor: float) -> str:
    content = memoryview(total.numpy()).cast("B")  # pyright: ignore
    return blake3.blake3(repr(divisor).encode()).update(content).hexdigest()
