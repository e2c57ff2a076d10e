"""Runs inside vLLM's worker, with vLLM's Python: receives weights in a broadcast whose members meet through the conductor."""

import http.client
import mmap
import socket
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import msgspec
import torch
import torch.distributed as dist

PATH = "/weights/rendezvous"
PIECE_BYTES = 2**25
LONG_POLL_S = 10.0
GRACE_S = 10.0
MEET_SHARE = 0.5
"""Of the deadline; the rest is for the weights themselves."""


def receive(
    content: mmap.mmap, url: str, credential: str, number: int, member: int, num_members: int,
    deadline_s: float,
) -> None:  # fmt: skip
    """Fill `content` with what is sent; raises RuntimeError, OSError or ValueError if that fails."""
    until_s = time.monotonic() + deadline_s
    meet_s = deadline_s * MEET_SHARE
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_address_towards(url))]
    options._timeout = timedelta(seconds=meet_s)
    store = Rendezvous(url, credential, number, meet_s)
    group = dist.ProcessGroupGloo(store, member, num_members, options)
    from_the_first = dist.BroadcastOptions()
    from_the_first.rootRank = from_the_first.rootTensor = 0
    for piece in torch.frombuffer(content, dtype=torch.uint8).split(PIECE_BYTES):
        left_s = max(until_s - time.monotonic(), 0.001)
        group.broadcast([piece], from_the_first).wait(timeout=timedelta(seconds=left_s))  # pyright: ignore


class Rendezvous(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """The conductor's keys of one broadcast, as torch.distributed asks for them."""

    def __init__(self, url: str, credential: str, number: int, deadline_s: float):
        super().__init__()
        self._address = urlsplit(url)
        self._headers = {"Authorization": f"Bearer {credential}", "Content-Type": "application/msgpack"}
        self._number = number
        self.set_timeout(timedelta(seconds=deadline_s))

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", [key], value=value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._values([key], self.timeout)[0]  # pyright: ignore[reportAttributeAccessIssue]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._values(list(keys), timeout or self.timeout)  # pyright: ignore[reportAttributeAccessIssue]

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", [key], amount=amount)["number"]

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("has", list(keys))["number"])

    def _values(self, keys: list[str], deadline: timedelta) -> list[bytes]:
        until_s = time.monotonic() + deadline.total_seconds()
        while True:
            wait_s = min(LONG_POLL_S, max(0.0, until_s - time.monotonic()))
            if (values := self._ask("get", keys, wait_s=wait_s)["values"]) is not None:
                return values
            if time.monotonic() >= until_s:
                raise RuntimeError(f"not all members of the broadcast were there within {deadline}")

    def _ask(self, operation: str, keys: list[str], wait_s: float = 0.0, **more: Any) -> dict[str, Any]:
        message = {"epoch": self._number, "operation": operation, "keys": keys, "wait_s": wait_s, **more}
        connection = http.client.HTTPConnection(
            self._address.hostname or "", self._address.port, timeout=wait_s + GRACE_S
        )
        try:
            connection.request("POST", PATH, msgspec.msgpack.encode(message), self._headers)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"the conductor answered {answer.status}: {body.decode(errors='replace')[:200]}")
        return msgspec.msgpack.decode(body)


def _address_towards(url: str) -> str:
    """The address of this machine by which it reaches the conductor: the members of the broadcast reach it there."""
    address = urlsplit(url)
    family, *_, target = socket.getaddrinfo(address.hostname, address.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # of a datagram socket: it asks for the route and sends nothing
        return probe.getsockname()[0]
