"""A Ray cluster for tests, with a token: nodes of this machine that have different addresses, and can be killed."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from polyrhythm.cluster.ray.checks import look

ROOT = Path(__file__).parents[1]
START_DEADLINE_S = 120.0
HEAD_ADDRESS, OTHER_ADDRESS = "127.0.0.2", "127.0.0.3"
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


class RayCluster:
    """Nodes by their address. Each is a session of its own: `ray stop` would end those of others, too."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-test-"))
        self.token_file = self.folder / "token"
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(secrets.token_hex(32))
        self.address = f"{HEAD_ADDRESS}:{_free_port()}"
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token_file)}
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start_head(self, **resources: float) -> None:
        port = self.address.rpartition(":")[2]
        self._start(HEAD_ADDRESS, resources, "--head", f"--port={port}", "--include-dashboard=false")

    def start_node(self, address: str, **resources: float) -> None:
        self._start(address, resources, f"--address={self.address}")

    def flags(self) -> dict[str, object]:
        """What a run on this cluster is told."""
        return {"cluster__kind": "ray", "cluster__address": self.address, "cluster__token_file": self.token_file}

    def kill_node(self, address: str) -> None:
        """SIGKILL to everything of the node at once, as when a machine is switched off: nobody there sees another one die."""
        parent = psutil.Process(self._nodes[address].pid)
        processes = [parent, *parent.children(recursive=True)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        self._nodes.pop(address).wait(START_DEADLINE_S)

    def close(self) -> None:
        for address in list(self._nodes):
            self.kill_node(address)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, address: str, resources: dict[str, float], *options: str) -> None:
        custom = {name: amount for name, amount in resources.items() if name != "CPU"}
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats",
            f"--node-ip-address={address}", f"--num-cpus={resources.get('CPU', 0):g}", "--num-gpus=0",
            f"--resources={json.dumps(custom)}", "--object-store-memory=80000000", f"--temp-dir={self.folder}", *options,
        ]  # fmt: skip
        with open(self.folder / f"{address}.log", "wb") as log:
            self._nodes[address] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | self.environment | SETTINGS | {"PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        self._wait_for(address)

    def _wait_for(self, address: str) -> None:
        until = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < until:
            host, _, port = self.address.partition(":")
            with socket.socket() as connection:
                is_there = connection.connect_ex((host, int(port))) == 0
            seen = look(self.address, self.environment) if is_there else {}
            if address in [node["address"] for node in seen.get("nodes", [])]:
                return
            time.sleep(0.2)
        raise AssertionError((self.folder / f"{address}.log").read_text())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HEAD_ADDRESS, 0))
        return probe.getsockname()[1]
