"""SmolLM2 learns to add with vLLM: alone, beside an embedded engine, and when vLLM is killed in the middle of a group."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import polyrhythm
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.observe.status import EngineState, EngineView
from polyrhythm.runs.rollouts import Rollouts
from polyrhythm.training.policy.tri_model import load_policy
from polyrhythm.training.trainer import Trainer
from polyrhythm.weights.pretrained import resolve_model

DEADLINE_S = 1200.0
NUM_ALONE, NUM_MIXED = 3, 3
MODEL = "smollm2-135m"


@pytest.mark.pretrained
def test_vllm_alone_then_beside_an_embedded_engine_then_killed_in_the_middle_of_a_group(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    others = processes_of_vllm()  # the server of other tests may still be there
    with polyrhythm.rollouts(**settings()) as loader:
        trainer = Trainer(loader.config, load_policy(resolve_model(MODEL)))
        loader.publish(trainer.policy)
        steps = loader.steps()
        for _ in range(NUM_ALONE):
            train_one(trainer, loader, steps)
        vllm = [process for process in processes_of_vllm() if process not in others]
        assert vllm and not listening_beyond_this_machine(vllm)
        with joined(loader, "helper", "--kind", "embedded"):
            wait_for(lambda: is_ready(engine(loader, "helper")))
            train_one(trainer, loader, steps)  # the next step begins with both
            with busy_engines(loader) as busy:
                train_one(trainer, loader, steps)
            wait_for(lambda: engine(loader, "engine-0").num_in_flight_groups > 0)
            vllm[0].kill()
            train_one(trainer, loader, steps)
            restarted = [process for process in processes_of_vllm() if process not in others]
    metrics = polyrhythm.Run(loader.folder).metrics
    assert len(metrics) == NUM_ALONE + NUM_MIXED
    assert all(step["onpolicy/violations"] == 0 for step in metrics)
    assert all(step["mismatch/logprob_abs_mean"] < 1e-4 for step in metrics), metrics
    assert busy == {"engine-0", "helper"}
    assert metrics[-1]["engines/lost"] >= 1
    left = [process for process in vllm + restarted if process.is_running() and process.status() != "zombie"]
    assert not left


@pytest.mark.pretrained
def test_weights_reach_vllm_by_broadcast(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with polyrhythm.rollouts(**settings(NUM_ALONE, transport="broadcast")) as loader:
        trainer = Trainer(loader.config, load_policy(resolve_model(MODEL)))
        loader.publish(trainer.policy)
        steps = loader.steps()
        for _ in range(NUM_ALONE):
            train_one(trainer, loader, steps)
            assert not listening_beyond_this_machine([psutil.Process(), *processes_of_vllm()])
    metrics = polyrhythm.Run(loader.folder).metrics
    assert [step["engines/received"] for step in metrics] == [0, 1, 1], "a newcomer reads the store"
    assert all(step["onpolicy/violations"] == 0 for step in metrics)
    assert all(step["mismatch/logprob_abs_mean"] < 1e-4 for step in metrics), metrics


def settings(num_steps: int = NUM_ALONE + NUM_MIXED, transport: str = "snapshot") -> dict:
    return {
        "model": MODEL,
        "num_steps": num_steps,
        "rollout": {"group_size": 4, "groups_per_step": 6, "max_tokens": 8},
        "engine": {
            "kind": "vllm",
            "max_batch": 8,
            "context_length": 256,
            "options": {"enforce-eager": True, "kv-cache-memory-bytes": 256 * 2**20},
        },
        "weights": {"load_deadline_s": 300.0, "transport": transport},
        "conductor": {"request_deadline_s": 900.0, "stall_deadline_s": 1800.0},
        "observe": {"view": "none"},
    }


def train_one(trainer: Trainer, loader: Rollouts, steps: Iterator) -> None:
    step = next(steps)
    trainer.begin_step(step.version)
    for update in step.updates():
        for micro_batch in update:
            trainer.forward_backward(micro_batch)
        trainer.optim_step()
    loader.publish(trainer.policy, trainer.metrics())


@contextmanager
def joined(loader: Rollouts, name: str, *arguments: str) -> Iterator[None]:
    """An engine that joins the run by hand."""
    url, token_file = RunFolder(loader.folder).url("conductor"), loader.folder / "tokens.json"
    command = [sys.executable, "-m", "polyrhythm", "engine", "--join", str(url), "--token-file", str(token_file)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([*command, "--name", name, "--threads", "1", *arguments], env=environment)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def busy_engines(loader: Rollouts) -> Iterator[set[str]]:
    """The engines that are seen to have groups while the block runs."""
    busy, ended = set(), threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            busy.update(e.name for e in RunFolder(loader.folder).admin().status().engines if e.num_in_flight_groups)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield busy
    finally:
        ended.set()
        watcher.join(60)


def engine(loader: Rollouts, name: str) -> EngineView:
    return next(e for e in RunFolder(loader.folder).admin().status().engines if e.name == name)


def is_ready(view: EngineView) -> bool:
    return view.state is EngineState.READY


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        try:
            if condition():
                return
        except StopIteration:
            pass
        time.sleep(0.02)
    raise TimeoutError


def processes_of_vllm() -> list[psutil.Process]:
    """Those of our descendants that run vLLM, the server first."""
    found = []
    for process in psutil.Process().children(recursive=True):
        line = " ".join(process.cmdline())
        if "vllm" in line.lower() and "polyrhythm" not in line.split("serve")[0]:
            found.append(process)
    return found


def listening_beyond_this_machine(processes: list[psutil.Process]) -> list[str]:
    sockets = [s for process in processes for s in process.net_connections("inet") if s.status == psutil.CONN_LISTEN]
    return [
        f"{s.laddr.ip}:{s.laddr.port}" for s in sockets if not s.laddr.ip.startswith("127.") and s.laddr.ip != "::1"
    ]
