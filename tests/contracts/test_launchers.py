"""What every launcher must do: start, end, tell how a process ended, and leave nothing behind."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from polyrhythm.cluster.launcher import LAUNCHERS, Launcher, ProcessSpec, RunProcess, make_launcher
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.config import ClusterConfig, Config, save_config
from tests.ray_cluster import RayCluster

DEADLINE_S = 60.0
"""Of what should take a moment, on a machine that may be busy."""
SAYS_PID = "import os; print('pid', os.getpid(), flush=True)"
SLEEPS = f"{SAYS_PID}; import time; time.sleep(600)"
IGNORES_SIGTERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"
WATCHES_ITS_PARENT = f"from polyrhythm.cluster.local_processes import leave_with_parent; leave_with_parent(); {SLEEPS}"


@pytest.fixture(scope="session")
def ray_cluster():
    cluster = RayCluster()
    try:
        cluster.start_head(CPU=2)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(params=LAUNCHERS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def folder(tmp_path, request, kind) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    if kind == "ray":
        cluster = request.getfixturevalue("ray_cluster")
        keys = {"address": cluster.address, "token_file": str(cluster.token_file)}
        save_config(Config(cluster=ClusterConfig(kind="ray", **keys)), folder.path / "config.json")
    return folder


@pytest.fixture
def start(kind, folder):
    """Start Python code as a process of the run."""
    launcher: Launcher = make_launcher(kind, folder)
    started: list[RunProcess] = []

    def start(code: str, name: str = "engine-0", num_threads: int = 1) -> RunProcess:
        started.append(launcher.start(ProcessSpec(name, "engine", [sys.executable, "-c", code], num_threads)))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.end(DEADLINE_S)
    launcher.close()


def wait_for(condition: Callable[[], object]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.02)


def wait_for_end(process: RunProcess) -> None:
    wait_for(lambda: process.returncode is not None)


def wait_for_pid(process: RunProcess) -> int:
    """The pid that a process has written, which says that it is ready, too."""
    wait_for(lambda: "pid " in process.log.read_text() and process.log.read_text().endswith("\n"))
    return int(process.log.read_text().split()[-1])


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_process_runs_under_its_name_with_its_threads_and_writes_to_its_log(start):
    process = start("import os; print('threads', os.environ['OMP_NUM_THREADS'])", name="engine-7", num_threads=3)
    wait_for_end(process)
    assert (process.name, process.returncode) == ("engine-7", 0)
    assert process.log.read_text() == "threads 3\n"


def test_a_process_that_is_started_again_goes_on_in_the_same_log(start):
    wait_for_end(start("print('here')"))
    process = start("print('here')")
    wait_for_end(process)
    assert process.log.read_text() == "here\nhere\n"


def test_a_process_ends_when_it_is_asked_to(start):
    process = start(SLEEPS)
    pid = wait_for_pid(process)
    assert process.returncode is None
    process.ask_to_end()
    process.end(DEADLINE_S)
    assert process.returncode == -signal.SIGTERM
    assert is_gone(pid)


@pytest.mark.parametrize("code", [SLEEPS, IGNORES_SIGTERM])
def test_killing_does_not_ask(start, code):
    process = start(code)
    pid = wait_for_pid(process)
    process.kill()
    assert process.returncode == -signal.SIGKILL
    assert is_gone(pid)


def test_a_stubborn_process_is_killed_at_the_deadline(start):
    process = start(IGNORES_SIGTERM)
    pid = wait_for_pid(process)
    process.ask_to_end()
    process.end(deadline_s=0.2)
    assert process.returncode == -signal.SIGKILL
    assert is_gone(pid)


def test_a_stubborn_process_is_killed_when_it_is_asked_again_later(start, monkeypatch):
    process = start(IGNORES_SIGTERM)
    wait_for_pid(process)
    process.ask_to_end()
    process.ask_to_end()
    assert process.returncode is None, "a moment has not passed"
    later_s = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    process.ask_to_end()
    monkeypatch.undo()
    wait_for_end(process)
    assert process.returncode == -signal.SIGKILL


def test_a_stopped_process_can_be_killed(start):
    process = start(SLEEPS)
    os.kill(wait_for_pid(process), signal.SIGSTOP)
    process.kill()
    assert process.returncode == -signal.SIGKILL


def test_a_death_is_seen_and_named(start):
    process = start(SLEEPS)
    os.kill(wait_for_pid(process), signal.SIGKILL)
    wait_for_end(process)
    assert process.describe_end() == f"engine-0 was killed by SIGKILL (log: {process.log})"


def test_a_failure_is_described_by_its_last_words(start):
    process = start("print('loading'); print('polyrhythm: out of luck'); raise SystemExit(1)")
    wait_for_end(process)
    assert process.describe_end() == f"engine-0 ended with exit code 1: out of luck (log: {process.log})"


def test_nothing_is_left_when_the_process_that_launches_is_killed(folder, kind, tmp_path):
    supervise = f"""
import sys, time
from pathlib import Path
from polyrhythm.cluster.launcher import ProcessSpec, make_launcher
from polyrhythm.cluster.run_folder import RunFolder
launcher = make_launcher({kind!r}, RunFolder(Path({str(tmp_path)!r})))
launcher.start(ProcessSpec("engine-0", "engine", [sys.executable, "-c", {WATCHES_ITS_PARENT!r}]))
time.sleep(600)
"""
    supervisor = psutil.Popen([sys.executable, "-c", supervise])
    log = Path(folder.logs / "engine-0.log")
    try:
        wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
        pid = int(log.read_text().split()[-1])
        assert not is_gone(pid)  # nothing but the death of its parent ends it
    finally:
        supervisor.kill()
        supervisor.wait(DEADLINE_S)
    wait_for(lambda: is_gone(pid))
    assert is_gone(pid)
