"""The one process that speaks with Ray, and the only import of it: `python -m polyrhythm.cluster.ray.driver`.

It is a process of its own because Ray's library ends the process that it is in when the head of the cluster is gone, and waits
without a deadline before that. `look ADDRESS` tells what the cluster has. `head OPTIONS` is `ray start` on loopback. `serve RUN
ADDRESS NODE` does what the launcher writes to standard input, line by line, and tells on standard output what becomes of the
processes; it ends when its standard input does, and Ray ends its actors then.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray._private import services
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polyrhythm.cluster.member import LOOPBACK
from polyrhythm.cluster.ray.command import CONDUCTOR, HOST
from polyrhythm.cluster.ray.node_process import NodeProcess
from polyrhythm.cluster.ray.placement import in_words, needs_of
from polyrhythm.cluster.run_folder import CREDENTIALS_FILE, RunFolder
from polyrhythm.cluster.standalone import is_loopback
from polyrhythm.config import Config

LOOK_DEADLINE_S = 5.0
PLACE_DEADLINE_S = 90.0
"""A node that has just died is believed to be there for some seconds."""
NEWS_S = 1.0
CALL_DEADLINE_S = 10.0
KILL_DEADLINE_S = 3.0
RETRY_S = 0.5
NOT_PLACED_EXIT_CODE = 1


@ray.remote
class Actor(NodeProcess):
    """A NodeProcess that knows where Ray has put it, and which accelerators it was given."""

    def place(self) -> tuple[str, dict[str, list[str]]]:
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_accelerator_ids()


def main(arguments: list[str]) -> int:
    if arguments[0] == "look":
        Events().tell(look(arguments[1]))
        return 0
    if arguments[0] == "head":
        return start_on_loopback(arguments[1:])
    events = Events()
    run_dir, address, node = arguments[1:]
    if node == LOOPBACK:
        keep_loopback()
    ray.init(
        address=address, namespace="polyrhythm", _node_ip_address=node, log_to_driver=False, logging_level=logging.ERROR,
        configure_logging=False,
    )  # fmt: skip
    serve(RunFolder(Path(run_dir)), events)
    os._exit(0)  # whatever Ray's threads are waiting for: the cluster notices, and ends the actors


def start_on_loopback(options: list[str]) -> int:
    """`ray start` for this machine alone."""
    from ray.scripts import scripts

    keep_loopback()
    sys.argv = ["ray", "start", f"--node-ip-address={LOOPBACK}", *options]
    scripts.main()
    return 0


def keep_loopback() -> None:
    """Ray puts the machine's own address in the place of 127.0.0.1. Left alone, it listens on loopback and nowhere else."""
    services.resolve_ip_for_localhost = lambda host: host


def look(address: str) -> dict[str, Any]:
    """The nodes of a cluster; `refused` if it does not know the token, `silent` if it does not answer.

    `ray.init` takes 21 s to say neither.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # it is compiled

    try:
        usage = GcsClient(address=address).get_all_resource_usage(timeout=LOOK_DEADLINE_S)
    except exceptions.AuthenticationError:
        return {"refused": True}
    except exceptions.RpcError as error:
        return {"silent": str(error)}
    nodes = [
        {
            "address": node.node_manager_address,
            "total": dict(node.resources_total),
            "free": dict(node.resources_available),
        }
        for node in usage.resource_usage_data.batch
    ]
    return {"nodes": nodes}


class Events:
    """What the launcher is told, line by line. Ray writes to standard output, too: from here on that goes to the log."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        self._lock = threading.Lock()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(self, event: Mapping[str, Any]) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            print(json.dumps(event), file=self._file, flush=True)


def serve(folder: RunFolder, events: Events) -> None:
    """Until standard input ends. Each process has a thread."""
    config = folder.config()
    placed: dict[int, Placed] = {}
    events.tell({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        number = request["process"]
        if "command" in request:
            placed[number] = Placed(folder, config, request, events)
            threading.Thread(target=placed[number].run, daemon=True).start()
        else:
            threading.Thread(target=placed[number].signal, args=(request["signal"],), daemon=True).start()


def answer(call: Any, deadline_s: float) -> Any:
    """What an actor has answered; GetTimeoutError at the deadline, another RayError if it cannot."""
    return ray.get(call, timeout=deadline_s)


class Placed:
    """One process: placed by Ray, then listened to until it has ended or Ray says that its actor has."""

    def __init__(self, folder: RunFolder, config: Config, request: Mapping[str, Any], events: Events):
        self._folder = folder
        self._config = config
        self._request = request
        self._events = events
        self._name: str = request["name"]
        self._needs = needs_of(request["role"], config)
        self._actor: Any = None
        self._is_started = False
        self._ending = threading.Lock()
        self._ended = threading.Event()

    def run(self) -> None:
        """Consumes news of the actor; produces log, announcement and events; ends when the process has."""
        try:
            address, accelerators = self._place()
            pid = self._start(address, accelerators)
            print(f"{self._name} runs on node {address} as process {pid}", file=sys.stderr, flush=True)
            self._tell({"node": address, "pid": pid})
            self._listen(pid, address)
        except exceptions.GetTimeoutError:
            self._end(
                NOT_PLACED_EXIT_CODE, f"no node had {in_words(self._needs)} free for it within {PLACE_DEADLINE_S:g} s"
            )
        except exceptions.RayError as error:
            self._end(-signal.SIGKILL, f"Ray lost it: {_first_line(error)}")
        except Exception as error:  # whatever it is, the supervisor must hear that the process will never be there
            self._end(NOT_PLACED_EXIT_CODE, f"it could not be placed: {_first_line(error)}")

    def signal(self, number: int) -> None:
        """A process that cannot be reached, or is not there yet, loses its actor: Ray ends what it can."""
        is_sent = False
        if self._is_started:
            with contextlib.suppress(exceptions.RayError):
                answer(self._actor.signal.remote(number), KILL_DEADLINE_S)
                is_sent = True
        if number == signal.SIGKILL or not is_sent:
            self._ended.wait(KILL_DEADLINE_S)
            self._end(-number, "")

    def _place(self) -> tuple[str, dict[str, list[str]]]:
        resources = dict(self._needs)
        options = {
            "num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None), "resources": resources, "max_restarts": 0, "max_concurrency": 8,
            "scheduling_strategy": self._strategy(),
        }  # fmt: skip
        self._actor = Actor.options(**options).remote()
        return answer(self._actor.place.remote(), PLACE_DEADLINE_S)

    def _strategy(self) -> Any:
        """The first rank writes into the run's folder: it is on the node of this machine if there is room."""
        if self._name == self._config.training.rank_names[0]:
            return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        return "SPREAD" if self._config.cluster.placement == "spread" else "DEFAULT"

    def _start(self, address: str, accelerators: dict[str, list[str]]) -> int:
        request, parts = self._request, self._request["command"]
        if CONDUCTOR in parts:
            where = {CONDUCTOR: self._folder.wait_for_conductor(), HOST: self._host(address)}
            parts = [where.get(part, part) for part in parts]
        credentials = self._folder.path / CREDENTIALS_FILE
        if self._config.device == "cpu":
            accelerators = {}
        pid = answer(
            self._actor.start.remote(
                parts, request["environment"], request["num_threads"],
                credentials.read_bytes() if credentials.exists() else b"", accelerators, os.getcwd(),
            ),
            CALL_DEADLINE_S,
        )  # fmt: skip
        self._is_started = True
        return pid

    def _host(self, address: str) -> str:
        """All nodes are on this machine if the conductor can only be reached from it."""
        host = self._config.conductor.host
        return host if is_loopback(host) else address

    def _listen(self, pid: int, address: str) -> None:
        is_announced = False
        with open(self._folder.logs / f"{self._name}.log", "ab") as log:
            while not self._ended.is_set():
                try:
                    news = answer(self._actor.news.remote(NEWS_S), NEWS_S + CALL_DEADLINE_S)
                except (exceptions.ActorUnavailableError, exceptions.GetTimeoutError):
                    time.sleep(RETRY_S)  # the conductor judges its engines; Ray only says when an actor is dead
                    continue
                except exceptions.ActorDiedError:
                    self._end(-signal.SIGKILL, f"it was lost with its actor on node {address}")
                    return
                log.write(news["written"])
                log.flush()
                if news["url"] and not is_announced:
                    self._folder.announce(self._name, news["url"], pid)
                    is_announced = True
                if news["returncode"] is not None:
                    self._end(news["returncode"], "")

    def _end(self, returncode: int, why: str) -> None:
        """Told once; the actor is not needed any more, and its resources are free."""
        with self._ending:
            is_first = not self._ended.is_set()
            self._ended.set()
        if is_first:
            self._tell({"returncode": returncode, "why": why})
            with contextlib.suppress(exceptions.RayError, ValueError):
                if self._actor is not None:
                    ray.kill(self._actor)

    def _tell(self, event: Mapping[str, Any]) -> None:
        self._events.tell({"process": self._request["process"], **event})


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
