"""What is known of a Ray cluster before anything starts: that it is there, knows the token, and has room for the run.

Every mistake is one line within ten seconds; Ray itself would wait.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from polyrhythm.cluster.cores import num_cores
from polyrhythm.cluster.ray.placement import Node, in_words, needs_of, plan_placement, wishes_of
from polyrhythm.cluster.standalone import is_loopback
from polyrhythm.config import Config
from polyrhythm.devices.found import find_devices
from polyrhythm.errors import UserError

CONNECT_DEADLINE_S = 3.0
LOOK_DEADLINE_S = 10.0
OWN = "this machine"
DEVICE_RESOURCES = {"cuda": "GPU", "npu": "NPU"}
WILDCARDS = ("", "0.0.0.0", "::")
RAYS_OWN_TOKEN = Path("~/.ray/auth_token")


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that answers."""

    address: str
    environment: dict[str, str]
    """How Ray's library is told the token."""
    nodes: list[Node] = field(default_factory=list)

    @property
    def node_here(self) -> str:
        """The address of its node on this machine, through which the run speaks with it; that of the head if it is here."""
        here = [node.address for node in self.nodes if _is_here(node.address)]
        head = self.address.rpartition(":")[0]
        return head if head in here else next(iter(here), "")


def check_ray(config: Config) -> list[str]:
    """What would be placed where, line by line; UserError, naming key, value and fix, for what would fail."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("cluster.kind='ray' needs the package ray: pip install 'polyrhythm[ray]'")
    _check_devices(config)
    if config.cluster.address:
        cluster = existing_cluster(config)
        where, nodes = f"the Ray cluster at {cluster.address}", cluster.nodes
    else:
        where, nodes = OWN, [own_node()]
    placed = plan_placement(wishes_of(config), nodes, where, config.cluster.placement == "spread")
    needs = {name: in_words(needs_of(name.split("-")[0], config)) for name in placed}
    first = where if config.cluster.address else "a cluster of its own on loopback, with a token, until the run ends"
    return [f"Ray: {first}", *(f"  {name} ({needs[name]}) fits on {node}" for name, node in placed.items())]


def existing_cluster(config: Config) -> Cluster:
    """The cluster at `cluster.address`; UserError if it is not there, asks for another token, or could not be used."""
    address = config.cluster.address
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or "/" in address:
        raise UserError(f"cluster.address={address!r} must be HOST:PORT of the cluster's head, such as 10.0.0.1:6379")
    environment = authentication(config)
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_DEADLINE_S).close()
    except (OSError, UnicodeError) as error:  # the second: it could not be the name of any host
        reason = (error.strerror or "no answer in time") if isinstance(error, OSError) else "no such host"
        raise UserError(
            f"cluster.address={address!r}: nobody answers there ({reason}); is `ray start --head` running?"
        ) from None
    seen = look(address, environment)
    if seen.get("refused"):
        raise UserError(f"cluster.address={address!r}: the Ray cluster refuses {_whose_token(config, environment)}")
    if "nodes" not in seen:
        raise UserError(f"cluster.address={address!r}: what answers there is no head of a Ray cluster of this version")
    cluster = Cluster(address, environment, [Node(**node) for node in seen["nodes"]])
    _check_reach(config, cluster)
    return cluster


def authentication(config: Config) -> dict[str, str]:
    """The environment by which Ray's library finds the token: `cluster.token_file`, or as the user has told Ray."""
    if not config.cluster.token_file:
        is_told = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
        has_token = is_told or RAYS_OWN_TOKEN.expanduser().is_file()
        return {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token" if has_token else "disabled")}
    path = Path(config.cluster.token_file).expanduser().resolve()
    try:
        token, mode = path.read_text().strip(), path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"cluster.token_file={config.cluster.token_file!r} cannot be read: {reason}") from None
    if not token:
        raise UserError(
            f"cluster.token_file={config.cluster.token_file!r} is empty: `ray get-auth-token` shows a token"
        )
    if mode & 0o077:
        raise UserError(f"cluster.token_file={config.cluster.token_file!r} can be read by others: chmod 600 {path}")
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path), "RAY_AUTH_TOKEN": token}


def look(address: str, environment: dict[str, str]) -> dict[str, Any]:
    """What the driver's `look` says; empty if it says nothing in time."""
    command = [sys.executable, "-m", "polyrhythm.cluster.ray.driver", "look", address]
    try:
        answer = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=LOOK_DEADLINE_S
        )
        return json.loads(answer.stdout) if answer.returncode == 0 else {}
    except (subprocess.TimeoutExpired, ValueError):
        return {}


def own_node() -> Node:
    """This machine as a node: what a cluster of its own is started with."""
    found = find_devices("auto")
    total = {"CPU": float(num_cores()), "memory": 0.7 * psutil.virtual_memory().available}
    if found.kind in DEVICE_RESOURCES:
        total[DEVICE_RESOURCES[found.kind]] = float(len(found.devices))
    return Node(OWN, total, total)


def _check_devices(config: Config) -> None:
    """Devices are given by Ray: a run on some of a kind must ask for them."""
    resource = DEVICE_RESOURCES.get(config.device)
    for key, role in (("engine.resources", "engine"), ("training.resources", "trainer")):
        if resource and not needs_of(role, config).get(resource):
            raise UserError(
                f"device={config.device!r} with cluster.kind='ray' needs {key} = {{{resource} = 1}}: Ray gives devices to "
                "those who ask"
            )


def _check_reach(config: Config, cluster: Cluster) -> None:
    """Nodes must reach the conductor, and the run must be started on one of them."""
    elsewhere = [node.address for node in cluster.nodes if not _is_here(node.address)]
    host = config.conductor.host
    if elsewhere and (is_loopback(host) or host in WILDCARDS):
        raise UserError(
            f"conductor.host={host!r} cannot be reached from the Ray cluster's node {elsewhere[0]}: set it to the address of "
            "this machine that its nodes reach"
        )
    if not cluster.node_here:
        nodes = ", ".join(elsewhere) or "none"
        raise UserError(
            f"this machine is not a node of the Ray cluster at {cluster.address} (nodes: {nodes}): start the run on one of "
            f"them, or `ray start --address={cluster.address}` here first"
        )


def _is_here(address: str) -> bool:
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return is_loopback(address) or address in own


def _whose_token(config: Config, environment: dict[str, str]) -> str:
    if config.cluster.token_file:
        return f"the token of cluster.token_file={config.cluster.token_file!r}: copy the one its head was started with"
    if environment["RAY_AUTH_MODE"] == "token":
        return "the token of RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token: give the right one with cluster.token_file"
    return "a run without a token: give the one its head was started with by cluster.token_file"
