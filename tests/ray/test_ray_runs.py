"""Runs on a Ray cluster of two nodes: what is refused, what listens where, and what a node that dies changes. Nothing."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.cluster.standalone import is_loopback
from polyrhythm.observe.status import RunStatus
from tests.integration.conftest import ROOT, Cli, fill_work_dir
from tests.ray_cluster import HEAD_ADDRESS, OTHER_ADDRESS, RayCluster

REFUSAL_DEADLINE_S = 10.0
ENGINES, RANKS = ("engine-0", "engine-1"), ("trainer-0", "trainer-1")
FLAGS = {
    "order": "problem", "num_steps": 12, "cluster__num_engines": 2, "engine__threads": 1, "training__threads": 1,
    "rollout__max_tokens": 64, "rollout__groups_per_step": 8, "training__num_ranks": 2,
}  # fmt: skip
HOLDS_ENGINES = f"""
import ray, time
ray.init(address="{{address}}", _node_ip_address="{HEAD_ADDRESS}", log_to_driver=False)
@ray.remote(num_cpus=0, resources={{{{"engines": 2, "node:{HEAD_ADDRESS}": 0.001}}}})
class Holder:
    def hold(self): return True
holder = Holder.remote()
ray.get(holder.hold.remote())
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def head_is_taken(cluster):
    """Somebody else has the engines' places on the head, until `release` is called: the run's engines go to the other node."""
    code = HOLDS_ENGINES.format(address=cluster.address)
    holder = subprocess.Popen(
        [sys.executable, "-c", code],
        env=cluster.environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"

    def release() -> None:
        holder.kill()
        holder.wait(30)

    yield release
    release()


@pytest.fixture
def start(cli):
    """Start the command line; what still runs at the end of a test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(arguments: list[str]) -> subprocess.Popen[str]:
        started.append(cli.start(arguments))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(60)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, tiny_model_dir) -> bytes:
    """The final weights of a run without Ray, to which nothing happens."""
    outcome = Cli(fill_work_dir(tmp_path_factory.mktemp("undisturbed")), tiny_model_dir).train(**FLAGS)
    assert outcome.returncode == 0, outcome.output
    return outcome.weights()


def refusal(cli: Cli, cluster: RayCluster, **flags) -> str:
    """The one line with which a run is refused, in time."""
    started_s = time.monotonic()
    outcome = cli.train(**(cluster.flags() | flags))
    assert time.monotonic() - started_s < REFUSAL_DEADLINE_S
    assert outcome.returncode == 2 and outcome.run_dir is None, outcome.output
    (line,) = [line for line in outcome.output.splitlines() if line.startswith("polyrhythm:")]
    return line


def test_a_wrong_token_is_one_line(cli, cluster, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.touch(mode=0o600)
    wrong.write_text("0" * 64)
    assert f"the Ray cluster refuses the token of cluster.token_file='{wrong}'" in refusal(
        cli, cluster, cluster__token_file=wrong
    )


def test_a_missing_token_is_one_line(cli, cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    line = refusal(cli, cluster, cluster__token_file="")
    assert "refuses a run without a token: give the one its head" in line


def test_an_address_where_nobody_is_is_one_line(cli, cluster):
    assert "nobody answers there" in refusal(cli, cluster, cluster__address=f"{OTHER_ADDRESS}:1")


def test_missing_resources_are_one_line_that_says_what_there_is(cli, cluster):
    line = refusal(cli, cluster, engine__resources='{"GPU": 1}', cluster__num_engines=3)
    assert "engine.resources asks for GPU 1 for each of 3 engines" in line and "has room for 0" in line
    assert f"{HEAD_ADDRESS} has GPU 0 beside CPU 2" in line and OTHER_ADDRESS in line


def test_engines_of_a_node_that_is_killed_are_replaced_on_the_other_and_the_weights_are_the_same(
    cli, start, cluster, head_is_taken, undisturbed
):
    flags = FLAGS | {"engine__resources": '{"engines": 1}', "training__resources": '{"ranks": 1}'}
    running = start(cli.arguments(**cluster.flags(), **flags))
    run_dir = cli.wait_for_steps(1)
    cli.wait_for(lambda: all(map(RunFolder(run_dir).url, ENGINES)), "the announcement of each engine")
    placed = (run_dir / "logs" / "ray.log").read_text()
    assert all(f"{name} runs on node {OTHER_ADDRESS}" in placed for name in ENGINES), placed
    assert all(f"{name} runs on node {HEAD_ADDRESS}" in placed for name in RANKS), placed
    assert_only_loopback(run_dir, running.pid)
    head_is_taken()
    in_the_middle_of_a_step(cli, run_dir)
    cluster.kill_node(OTHER_ADDRESS)

    outcome = cli.finish(running)
    assert outcome.returncode == 0, outcome.output
    placed = (run_dir / "logs" / "ray.log").read_text()
    assert all(f"{name} runs on node {HEAD_ADDRESS}" in placed for name in ENGINES), placed
    assert "it was lost with its actor on node" in outcome.output and "it is started again, 1 of 3" in outcome.output
    rows = outcome.metrics()
    assert sum(row["engines/lost"] for row in rows) >= 2
    assert sum(row["groups/replaced"] for row in rows) == sum(row["onpolicy/violations"] for row in rows) == 0
    assert outcome.weights() == undisturbed


def in_the_middle_of_a_step(cli: Cli, run_dir: Path) -> None:
    def has_groups_in_flight() -> bool:
        status = msgspec.json.decode(cli.ask_conductor(run_dir, "/status"), type=RunStatus)
        return status.groups.dispatched > status.groups.complete

    cli.wait_for(has_groups_in_flight, "a group in flight")


def assert_only_loopback(run_dir: Path, supervisor: int) -> None:
    """Nothing of ours listens where another machine could reach it; the driver has a port of Ray's, which asks for the token."""
    conductor = RunFolder(run_dir).url("conductor")
    placed = [process for process in psutil.process_iter(["cmdline"]) if conductor in (process.info["cmdline"] or [])]
    assert len(placed) == len(ENGINES) + len(RANKS)
    ours = [*placed, psutil.Process(supervisor), *psutil.Process(supervisor).children(recursive=True)]
    listening = [(process, address) for process in ours for address in addresses_listened_at(process)]
    assert len(listening) >= 1 + len(ENGINES)
    outside = [process.cmdline() for process, address in listening if not is_loopback(address)]
    assert [command[1:4] for command in outside] == [["-m", "polyrhythm.cluster.ray.driver", "serve"]], outside


def addresses_listened_at(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        sockets = process.net_connections("inet")
        return [socket.laddr.ip.removeprefix("::ffff:") for socket in sockets if socket.status == psutil.CONN_LISTEN]
    return []


def test_a_cluster_of_our_own_is_on_loopback_and_ends_with_the_run_however_it_ends(cli, start):
    running = start(cli.arguments(cluster__kind="ray", engine__threads=1, training__threads=1, num_steps=100_000))
    cli.wait_for(lambda: running.poll() is not None or has_a_step(cli), "the first step")
    assert running.poll() is None, running.stdout.read()
    processes = psutil.Process(running.pid).children(recursive=True)
    names = {process.name() for process in processes}
    assert {"gcs_server", "raylet"} <= names, names
    outside = [process.cmdline() for process in processes if not all(map(is_loopback, addresses_listened_at(process)))]
    assert not outside
    (folder,) = {part for process in processes for part in process.cmdline() if is_folder_of_ray(part)}
    assert not Path(folder).stat().st_mode & 0o077, "nobody else reaches the token and Ray's sockets"
    running.kill()
    cli.wait_for(lambda: not any(map(is_alive, processes)), "the end of every process")
    cli.wait_for(lambda: not Path(folder).exists(), "the removal of Ray's folder")


def has_a_step(cli: Cli) -> bool:
    run_dir = cli.newest_run()
    metrics = run_dir / "metrics.jsonl" if run_dir else None
    return metrics is not None and metrics.exists() and bool(metrics.read_text())  # it is empty in the beginning


def is_folder_of_ray(part: str) -> bool:
    return Path(part).name.startswith("polyrhythm-ray-") and Path(part).is_dir()


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
