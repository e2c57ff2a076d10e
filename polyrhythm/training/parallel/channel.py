"""What ranks say to each other besides tensors: msgpack over a process group, because pickle would run what it is sent."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.errors import AnotherFailed

T = TypeVar("T")
DEADLINE = timedelta(days=1)
"""Ranks may finish far apart. The conductor judges whether anything still happens and, if not, ends all of them."""
LIBRARIES = ("gloo", "nccl", "hccl", "process group", "connection")
"""Words of what is raised in a collective operation when a rank has gone: it may come out of any tensor operation."""

log = logging.getLogger(__name__)


class Channel:
    """The ranks of a process group, in their order. Every call is collective. A channel of one needs no group."""

    def __init__(self, num: int = 1, device: torch.device | None = None, group: dist.ProcessGroup | None = None):
        self.num = num
        self.group = group
        self._device = device or torch.device("cpu")

    def gather(self, message: T, kind: type[T] | None = None) -> list[T]:
        """What every rank has to say. `kind` is the message's type, if its class alone does not tell."""
        if self.num == 1:
            return [message]
        said = _encoded(message)
        length = torch.tensor([len(said)])
        lengths = [torch.zeros_like(length) for _ in range(self.num)]
        with lost_ranks_named():
            self._all_gather(lengths, length)
            longest = int(max(lengths))
            padded = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.num)]
            self._all_gather(padded, torch.nn.functional.pad(said, (0, longest - len(said))))
        rows = [row[: int(num)].numpy().tobytes() for row, num in zip(padded, lengths, strict=True)]
        return [msgspec.msgpack.decode(row, type=kind or type(message)) for row in rows]

    def from_first(self, parts: list[bytes]) -> list[bytes]:
        """What the first rank has to say; of the others' words nothing is read."""
        if self.num == 1:
            return parts
        said = _encoded(parts)
        length = torch.tensor([len(said)])
        with lost_ranks_named():
            length = self._broadcast(length)
            heard = self._broadcast(said if len(said) == int(length) else torch.zeros(int(length), dtype=torch.uint8))
        return msgspec.msgpack.decode(heard.numpy().tobytes(), type=list[bytes])

    @property
    def is_first(self) -> bool:
        return self.num == 1 or dist.get_rank(self.group) == 0

    def wait_for_all(self) -> None:
        self.largest(0)

    def largest(self, number: int) -> int:
        if self.num == 1:
            return number
        numbers = torch.tensor([number], device=self._device)
        with lost_ranks_named():
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group)
        return int(numbers)

    def _all_gather(self, into: list[Tensor], tensor: Tensor) -> None:
        there = [row.to(self._device) for row in into]
        dist.all_gather(there, tensor.to(self._device), group=self.group)
        for row, received in zip(into, there, strict=True):
            row.copy_(received)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        there = tensor.to(self._device)
        dist.broadcast(there, group=self.group, group_src=0)
        return there.cpu()


def aside(teams: Sequence[Sequence[int]]) -> Channel:
    """One more channel among the ranks of the team that this rank is in. All ranks call this, for all teams.

    On the host, whatever the device: another thread may use it while this one computes.
    """
    groups = [dist.new_group(list(team), timeout=DEADLINE, backend="gloo") for team in teams]
    own = next(index for index, team in enumerate(teams) if dist.get_rank() in team)
    return Channel(len(teams[own]), group=groups[own])  # pyright: ignore


def add_up(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Put the sum over the group's ranks into each tensor."""
    with lost_ranks_named():
        for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
            assert work is not None
            work.wait(timeout=DEADLINE)


@contextmanager
def lost_ranks_named() -> Iterator[None]:
    """A collective operation inside that fails says that another rank is gone. Sharded passes have them everywhere."""
    try:
        yield
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in LIBRARIES):
            raise
        log.warning("a collective operation failed: %s", error)
        raise AnotherFailed("another rank of the trainer does not answer") from None


def _encoded(message: object) -> Tensor:
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(message)), dtype=torch.uint8)
