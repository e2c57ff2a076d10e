"""The ranks of the trainer: each is a replica by itself, a process with the whole policy.

That they stay equal is not assumed: at every step the others check their weights against those that the writer has
published.
"""

import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from polyrhythm.devices import choose_device
from polyrhythm.errors import AnotherFailed, RunError
from polyrhythm.types import MicroBatch

T = TypeVar("T")
DEADLINE = timedelta(days=1)
"""Ranks may finish far apart. The conductor judges whether anything still happens and, if not, ends all of them."""

log = logging.getLogger(__name__)


class WholeReplica:
    """A `Replica` of one rank. The first rank is the writer."""

    def __init__(self, index: int = 0, num: int = 1, device: torch.device | None = None):
        self.index = index
        self.num = num
        self._device = device or torch.device("cpu")

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
        self._all_reduce(gradients)
        return sum(self.gather(divisor))  # on the host: not every device has double precision

    def _all_reduce(self, tensors: Sequence[Tensor]) -> None:
        try:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                assert work is not None
                work.wait(timeout=DEADLINE)
        except RuntimeError as error:
            raise _lost(error) from None

    def gather(self, message: T) -> list[T]:
        """As msgpack, because pickle would run what it is sent."""
        if self.num == 1:
            return [message]
        said = torch.frombuffer(bytearray(msgspec.msgpack.encode(message)), dtype=torch.uint8)
        length = torch.tensor([len(said)])
        lengths = [torch.zeros_like(length) for _ in range(self.num)]
        try:
            self._all_gather(lengths, length)
            longest = int(max(lengths))
            padded = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.num)]
            self._all_gather(padded, torch.nn.functional.pad(said, (0, longest - len(said))))
        except RuntimeError as error:
            raise _lost(error) from None
        rows = [row[: int(num)].numpy().tobytes() for row, num in zip(padded, lengths, strict=True)]
        return [msgspec.msgpack.decode(row, type=type(message)) for row in rows]

    def _all_gather(self, into: list[Tensor], tensor: Tensor) -> None:
        there = [row.to(self._device) for row in into]
        dist.all_gather(there, tensor.to(self._device))
        for row, received in zip(into, there, strict=True):
            row.copy_(received)


def join_ranks(rank: int, num: int, meeting_file: Path, deadline: timedelta = DEADLINE) -> WholeReplica:
    """Wait for the other ranks of this machine. They find each other through a file that only their user can read.

    Each sees its own device alone (devices/plan.py); that has not been run on any accelerator.
    """
    if num == 1:
        return WholeReplica()
    device = choose_device()
    for library in ("GLOO", "NCCL", "HCCL"):  # each would listen on the first address of the machine
        os.environ[f"{library}_SOCKET_IFNAME"] = _loopback_interface()
    try:
        store = dist.FileStore(str(meeting_file), num)  # pyright: ignore
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num, timeout=deadline)
    except (RuntimeError, ValueError) as error:
        raise RunError(f"rank {rank} of {num} did not meet the others within {deadline}: {error}") from None
    return WholeReplica(rank, num, device)


def leave_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _loopback_interface() -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    raise RunError("this machine has no loopback interface: ranks of the trainer cannot meet; use training.num_ranks=1")


def _lost(error: RuntimeError) -> AnotherFailed:
    log.warning("a collective operation failed: %s", error)
    return AnotherFailed("another rank of the trainer does not answer")
