"""A ring of host buffers between where numbers are and the file: one is filled while others are digested and written.

Buffers are pinned if the device can do that: a device then copies at its full speed, and the host waits for nothing else. They are
kept, because pinning takes longer than a copy.
"""

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

NUM_BUFFERS = 4

log = logging.getLogger(__name__)


class Ring:
    """Buffers of `num_bytes` each; whoever uses a content says so, and it stays until that is done."""

    def __init__(self, num_bytes: int):
        self._num_bytes = num_bytes
        self._buffers: list[Tensor] = []
        self._users: list[list[Future[Any]]] = [[] for _ in range(NUM_BUFFERS)]
        self._turn = 0

    def copied(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """The bytes of these numbers in that number format, in the buffer that was used longest ago."""
        if len(self._buffers) < NUM_BUFFERS:
            self._buffers.append(_new_buffer(self._num_bytes, numbers.device))
            self._turn = len(self._buffers) - 1
        else:
            self._turn = (self._turn + 1) % NUM_BUFFERS
        for user in self._users[self._turn]:
            user.exception()  # it is done; whoever asked for it hears how
        content = self._buffers[self._turn][: numbers.numel() * dtype.itemsize]
        if numbers.device.type != "cpu":
            numbers = numbers.to(dtype)  # there, so that fewer bytes are copied
        content.view(dtype).copy_(numbers)
        return content

    def used_by(self, users: Iterable[Future[Any]]) -> None:
        """What was copied last must stay until these are done."""
        self._users[self._turn] = list(users)


def _new_buffer(num_bytes: int, device: torch.device) -> Tensor:
    if device.type != "cpu":
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            log.warning("host memory cannot be pinned for %s, so copies are slower: %s", device, error)
    return torch.empty(num_bytes, dtype=torch.uint8)
