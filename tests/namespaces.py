"""Other machines on this one: network namespaces, each joined to this one by a cable that can be cut. For root on Linux."""

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

DEADLINE_S = 30.0


@dataclass
class Machine:
    """A namespace. What is started with `command` runs in it, at `address`."""

    namespace: str
    address: str
    cable: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]

    def cut_off(self) -> None:
        """Pull the cable: nothing arrives any more, and nobody is told."""
        _ip("-n", self.namespace, "link", "set", self.cable, "down")


@dataclass
class Network:
    here: str
    """The address by which the machines reach this one."""
    machines: list[Machine]


@contextmanager
def network(num_machines: int) -> Iterator[Network]:
    """So many machines beside this one. Without the privilege to make them, the test is skipped."""
    part, tag = random.randrange(256), os.urandom(2).hex()
    here, machines = f"10.213.{part}.1", []
    try:
        for index in range(num_machines):
            machine = Machine(f"poly-{tag}-{index}", f"10.213.{part}.{4 * index + 2}", "cable")
            _make(machine, f"poly{tag}{index}", f"10.213.{part}.{4 * index + 1}", here)
            machines.append(machine)
        yield Network(here, machines)
    finally:
        for index in range(num_machines):
            subprocess.run(["ip", "netns", "del", f"poly-{tag}-{index}"], stderr=subprocess.DEVNULL, timeout=DEADLINE_S)
            subprocess.run(["ip", "link", "del", f"poly{tag}{index}"], stderr=subprocess.DEVNULL, timeout=DEADLINE_S)


def _make(machine: Machine, our_end: str, our_address: str, here: str) -> None:
    try:
        _ip("netns", "add", machine.namespace)
        _ip("link", "add", our_end, "type", "veth", "peer", "name", machine.cable, "netns", machine.namespace)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"network namespaces need root on Linux: {said.strip()}")
    _ip("addr", "add", f"{our_address}/30", "dev", our_end)
    _ip("link", "set", our_end, "up")
    for words in (
        ("addr", "add", f"{machine.address}/30", "dev", machine.cable),
        ("link", "set", machine.cable, "up"),
        ("link", "set", "lo", "up"),
        (
            "route",
            "replace",
            f"{here}/32",
            "via" if our_address != here else "dev",
            our_address if our_address != here else machine.cable,
        ),
    ):
        _ip("-n", machine.namespace, *words)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=DEADLINE_S)
