"""The launcher of `cluster.kind = "ray"`: Ray places engines and ranks, the conductor is a process of this machine."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyrhythm.cluster.launcher import ProcessSpec, RunProcess, describe_end
from polyrhythm.cluster.local_processes import KILL_DEADLINE_S, LocalLauncher
from polyrhythm.cluster.ray.checks import Cluster, existing_cluster
from polyrhythm.cluster.ray.command import joining_command
from polyrhythm.cluster.ray.own_cluster import OwnCluster
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.errors import RunError

READY_DEADLINE_S = 60.0
CLOSE_DEADLINE_S = 5.0
LOST_DEADLINE_S = KILL_DEADLINE_S + 5.0
"""The driver has given up a process that it cannot reach by then."""
LOG_NAME = "ray.log"
DRIVER_ENDED = f"the process that speaks with Ray has ended, see {LOG_NAME}"

log = logging.getLogger(__name__)


class RayLauncher:
    """Starts processes of one run by way of Ray. Its own cluster, if the run has one, ends with it."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._here = LocalLauncher(folder)
        self._config = folder.config()
        self._own_cluster: OwnCluster | None = None
        self._driver: Driver | None = None

    def start(self, spec: ProcessSpec) -> RunProcess:
        if spec.role == "conductor":
            return self._here.start(spec)
        if self._driver is not None and self._driver.has_ended:
            self.close()
        if self._driver is None:
            self._driver = self._start_driver()
        return self._driver.start(spec, joining_command(spec.command, self._folder, self._config))

    def close(self) -> None:
        """Nothing of the run is left on any node."""
        if self._driver is not None:
            self._driver.close()
        if self._own_cluster is not None:
            self._own_cluster.close()
        self._driver = self._own_cluster = None

    def _start_driver(self) -> "Driver":
        if self._config.cluster.address:
            cluster = existing_cluster(self._config)
        else:
            self._own_cluster = OwnCluster(self._folder.logs / LOG_NAME)
            cluster = self._own_cluster.start()
        driver = Driver(self._folder, cluster)
        driver.wait_until_ready()
        return driver


class Driver:
    """The process that speaks with Ray, as seen from here: lines go in, events come out. It ends when this process does."""

    def __init__(self, folder: RunFolder, cluster: Cluster):
        self._log = folder.logs / LOG_NAME
        self._logs = folder.logs
        with open(self._log, "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "polyrhythm.cluster.ray.driver", "serve", str(folder.path), cluster.address, cluster.node_here],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env=os.environ | cluster.environment,
                start_new_session=True,
            )  # fmt: skip
        self._is_ready = threading.Event()
        self._sending = threading.Lock()
        self._processes: list[RayProcess] = []
        self.has_ended = False
        threading.Thread(target=self._listen, name="ray-driver", daemon=True).start()

    def wait_until_ready(self) -> None:
        """Until it has joined the cluster; RunError with its last words if it does not."""
        self._is_ready.wait(READY_DEADLINE_S)
        if not self._is_ready.is_set() or self.has_ended:
            self.close()
            words = self._log.read_text(errors="replace").strip().splitlines()
            said = f": {words[-1]}" if words else ""
            raise RunError(f"Ray could not be joined within {READY_DEADLINE_S:g} s{said} (log: {self._log})")

    def start(self, spec: ProcessSpec, command: list[str]) -> "RayProcess":
        path = self._logs / f"{spec.name}.log"
        path.touch()
        process = RayProcess(spec.name, path, len(self._processes), self)
        self._processes.append(process)
        if self.has_ended:  # just now: nobody else will tell this one
            process.has_ended(-signal.SIGKILL, DRIVER_ENDED)
        self.send(
            {
                "process": process.number, "name": spec.name, "role": spec.role, "command": command,
                "environment": dict(spec.environment), "num_threads": spec.num_threads,
            }
        )  # fmt: skip
        return process

    def send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with self._sending, contextlib.suppress(OSError):  # if it is gone, so are its processes, and that is seen
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(KILL_DEADLINE_S)

    def _listen(self) -> None:
        """Consumes the driver's events until it ends; each process learns its own, and all of them that it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if "ready" in event:
                self._is_ready.set()
            elif "returncode" in event:
                self._processes[event["process"]].has_ended(event["returncode"], event["why"])
        self.has_ended = True
        self._is_ready.set()
        for process in self._processes:
            process.has_ended(-signal.SIGKILL, DRIVER_ENDED)


class RayProcess:
    """A process on some node, known by what the driver tells of it."""

    def __init__(self, name: str, log: Path, number: int, driver: Driver):
        self.name = name
        self.log = log
        self.number = number
        self._driver = driver
        self._asked_at_s: float | None = None
        self._returncode: int | None = None
        self._why = ""
        self._ended = threading.Event()

    @property
    def returncode(self) -> int | None:
        return self._returncode

    def has_ended(self, returncode: int, why: str) -> None:
        if not self._ended.is_set():
            self._returncode, self._why = returncode, why
            self._ended.set()

    def ask_to_end(self) -> None:
        now_s = time.monotonic()
        if self._asked_at_s is None:
            self._asked_at_s = now_s
            if self.returncode is None:
                self._send(signal.SIGTERM)
        elif now_s - self._asked_at_s > KILL_DEADLINE_S and self.returncode is None:
            self.kill()

    def kill(self) -> None:
        if self.returncode is None:
            self._send(signal.SIGKILL)
            if not self._ended.wait(LOST_DEADLINE_S):
                log.warning("%s cannot be reached on its node and is given up", self.name)
                self.has_ended(-signal.SIGKILL, "its node cannot be reached")

    def end(self, deadline_s: float) -> None:
        if not self._ended.wait(deadline_s):
            self.kill()

    def describe_end(self) -> str:
        if self._why:
            return f"{self.name}: {self._why} (log: {self.log})"
        return describe_end(self.name, self.returncode or 0, self.log)

    def _send(self, number: signal.Signals) -> None:
        self._driver.send({"process": self.number, "signal": int(number)})
