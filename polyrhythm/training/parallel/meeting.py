"""How ranks find each other: through the conductor, with the run's token. No port is opened for it.

The conductor says who the members are; `ConductorStore` is the key-value store that torch.distributed asks for. What the
ranks then tell each other goes through connections of gloo or nccl, on the interface by which the conductor is reached.
"""

import os
import socket
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import urlsplit

import psutil
import torch.distributed as dist

from polyrhythm import messages
from polyrhythm.errors import AnotherFailed, RunError, UserError
from polyrhythm.http.client import BlockingClient
from polyrhythm.http.errors import ErrorReply, NoAnswer

LONG_POLL_S = 20.0
JOIN_POLL_S = 2.0
GRACE_S = 30.0
RUN_FAILED = 503
REFUSED = (409, 412)
MEMBER = uuid.uuid4().hex
"""This process, by a name that no other has."""
LIBRARIES = ("GLOO", "NCCL", "HCCL")
RANKS = "/rendezvous"
"""Where ranks find each other."""


class Unreached(AnotherFailed):
    """The conductor does not answer; it may do so later."""


class ConductorLine:
    """Calls of one rank, from any thread: each has a connection of its own, because calls may wait for each other."""

    def __init__(self, url: str, credential: str):
        self.url = url
        self._credential = credential

    def call(
        self,
        path: str,
        message: Any,
        wait_s: float = 0.0,
        refusal: type[Exception] = RunError,
        grace_s: float = GRACE_S,
    ) -> bytes:
        """An answer is due `grace_s` after the conductor has waited for `wait_s`."""
        try:
            with BlockingClient(self.url, self._credential, peer="the conductor") as client:
                return client.call("POST", path, message, deadline_s=wait_s + grace_s)
        except NoAnswer as error:
            raise Unreached(str(error)) from None
        except ErrorReply as error:
            if error.status in REFUSED:
                raise refusal(error.said) from None
            failed = AnotherFailed if error.status == RUN_FAILED else RunError
            raise failed(str(error)) from None


def take_rank(line: ConductorLine, name: str, setup: messages.Setup, has_run_folder: bool) -> str:
    """Take the place of this name in the run, or a free one if there is no name; the name."""
    return _join(line, messages.RankJoin(name, MEMBER, 0.0, has_run_folder, setup)).name


def meet_others(
    line: ConductorLine, name: str, deadline: timedelta, setup: messages.Setup | None = None
) -> messages.Membership:
    """Take the place of this name in the run, if this process has not, and wait until all ranks have joined."""
    until_s = time.monotonic() + deadline.total_seconds()
    while True:
        wait_s = min(JOIN_POLL_S, max(0.0, until_s - time.monotonic()))
        membership = _join(line, messages.RankJoin(name, MEMBER, wait_s, setup=setup))
        if membership.epoch:
            return membership
        if time.monotonic() > until_s:
            there = ", ".join(membership.members)
            raise RunError(f"{name} did not meet the other ranks of the run within {deadline}: there are {there}")


def _join(line: ConductorLine, request: messages.RankJoin) -> messages.Membership:
    return messages.decode(line.call("/ranks/join", request, request.wait_s, UserError), messages.Membership)


class ConductorStore(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """The store of one epoch at one of the conductor's rendezvous. torch calls it by these names, from whatever thread."""

    _alive: ClassVar[list["ConductorStore"]] = []
    """Groups hold only torch's half of a store, and call into nothing once the Python half is gone."""

    def __init__(self, line: ConductorLine, epoch: int, deadline: timedelta, path: str = RANKS):
        super().__init__()
        self._line = line
        self._path = path
        self._epoch = epoch
        self.set_timeout(deadline)
        self._alive.append(self)

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", [key], value=value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._values([key], self.timeout)[0]  # pyright: ignore[reportAttributeAccessIssue]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._values(list(keys), timeout or self.timeout)  # pyright: ignore[reportAttributeAccessIssue]

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", [key], amount=amount).number

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("has", list(keys)).number)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        values = self._ask("compare_set", [key], expected=expected.encode(), value=value.encode()).values
        assert values
        return values[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]).number)

    def num_keys(self) -> int:
        return self._ask("num_keys", []).number

    def _values(self, keys: list[str], deadline: timedelta) -> list[bytes]:
        until_s = time.monotonic() + deadline.total_seconds()
        while True:
            wait_s = min(LONG_POLL_S, max(0.0, until_s - time.monotonic()))
            values = self._ask("get", keys, wait_s=wait_s).values
            if values is not None:
                return values
            if time.monotonic() >= until_s:
                raise dist.DistStoreError(f"{', '.join(keys)}: nobody has set it within {deadline}")

    def _ask(self, operation: str, keys: list[str], wait_s: float = 0.0, **more: Any) -> messages.RendezvousReply:
        message = messages.RendezvousRequest(self._epoch, operation, keys, wait_s=wait_s, **more)  # pyright: ignore
        return messages.decode(self._line.call(self._path, message, wait_s), messages.RendezvousReply)


def bind_to_route(url: str) -> str:
    """Let the libraries of collective operations listen only on the interface by which `url` is reached; its name."""
    interface = interface_to(url)
    os.environ.pop("TORCH_GLOO_LAZY_INIT", None)  # a connection that is made later hangs if its peer has died by then
    for library in LIBRARIES:  # each would listen on the first address of the machine
        os.environ[f"{library}_SOCKET_IFNAME"] = interface
    return interface


def interface_to(url: str) -> str:
    """The interface of this machine whose address others see when it talks to `url`."""
    here = _address_towards(url)
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == here for address in addresses):
            return name
    raise RunError(f"no network interface of this machine has the address {here}, by which it reaches {url}")


def _address_towards(url: str) -> str:
    address = urlsplit(url)
    try:
        family, *_, target = socket.getaddrinfo(address.hostname, address.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # of a datagram socket: it asks for the route and sends nothing
            here = probe.getsockname()[0]
    except OSError as error:
        raise AnotherFailed(f"the conductor at {url} cannot be reached: {error.strerror}") from None
    return "127.0.0.1" if here.startswith("127.") else here
