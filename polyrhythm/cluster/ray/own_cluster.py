"""A Ray cluster of one node on this machine, for one run: on loopback, with a token of its own, and gone when the run is."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from polyrhythm.cluster.ray.checks import Cluster, look, own_node
from polyrhythm.cluster.ray.placement import Node
from polyrhythm.cluster.standalone import is_loopback
from polyrhythm.errors import RunError

START_DEADLINE_S = 120.0
CLOSE_DEADLINE_S = 10.0
LOOK_AGAIN_S = 0.3
WORKER_PORTS = 100
RAYS_OWN = "r"
"""In our folder, which nobody else can enter: Ray makes its own open to everybody. Short, because it holds sockets."""
GUARD = Path(__file__).with_name("guard.py")
OBJECT_STORE_BYTES = 100_000_000
"""Nothing of a run goes through Ray's object store."""
SETTINGS = {
    "RAY_memory_monitor_refresh_ms": "0",  # it would end an actor because of what its process takes
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}


class OwnCluster:
    """`start` it, and `close` it. A guard ends it when this process does, however that ends."""

    def __init__(self, log: Path):
        self._log = log
        self._folder = Path(tempfile.mkdtemp(prefix="polyrhythm-ray-"))
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self) -> Cluster:
        """The cluster, once it answers; RunError if it does not in time."""
        token_file = self._folder / "token"
        descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        authentication = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
        port = _free_port()
        with open(self._log, "ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, str(GUARD), str(self._folder), *_head_command(port, self._folder / RAYS_OWN, own_node())],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=os.environ | authentication | SETTINGS,
                start_new_session=True,
            )  # fmt: skip
        try:
            return self._wait_until_it_answers(f"127.0.0.1:{port}", authentication)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            try:
                self._guard.wait(CLOSE_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._guard.kill()
                self._guard.wait(CLOSE_DEADLINE_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_until_it_answers(self, address: str, environment: dict[str, str]) -> Cluster:
        assert self._guard is not None
        until = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < until and self._guard.poll() is None:
            with socket.socket() as connection:
                host, _, port = address.partition(":")
                is_there = connection.connect_ex((host, int(port))) == 0
            nodes = look(address, environment).get("nodes") if is_there else None
            if nodes:
                return _on_loopback(Cluster(address, environment, [Node(**node) for node in nodes]))
            time.sleep(LOOK_AGAIN_S)
        raise RunError(f"Ray did not start within {START_DEADLINE_S:g} s (log: {self._log})")


def _on_loopback(cluster: Cluster) -> Cluster:
    """Another release of Ray may listen elsewhere again: then there is no run."""
    if outside := [node.address for node in cluster.nodes if not is_loopback(node.address)]:
        raise RunError(f"Ray took {outside[0]} for a cluster that must stay on loopback: is it another release?")
    return cluster


def _head_command(port: int, folder: Path, node: Node) -> list[str]:
    first = _free_port()
    return [
        sys.executable, "-m", "polyrhythm.cluster.ray.driver", "head", "--head", "--block", "--disable-usage-stats",
        f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false",
        f"--object-store-memory={OBJECT_STORE_BYTES}", f"--num-cpus={node.total['CPU']:g}",
        f"--num-gpus={node.total.get('GPU', 0):g}",
        f"--ray-client-server-port={_free_port()}", f"--min-worker-port={first}", f"--max-worker-port={first + WORKER_PORTS}",
    ]  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
