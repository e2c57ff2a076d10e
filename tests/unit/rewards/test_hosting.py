"""Functions that are objects of this process, scored in workers that are forked from it."""

import asyncio
import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from polyrhythm.config import RewardConfig
from polyrhythm.errors import RunError, UserError
from polyrhythm.rewards.checks import import_in_worker
from polyrhythm.rewards.functions import choose_rewards
from polyrhythm.rewards.sandbox.frames import GroupScores, GroupToScore, RewardFunction, WorkerSetup
from polyrhythm.rewards.sandbox.hosting import host_functions, importable_name
from polyrhythm.rewards.sandbox.pool import RewardPool
from polyrhythm.tasks import addition

ROOT = Path(__file__).parents[3]
SCRIPT = """
import asyncio, os, sys, time
from polyrhythm.rewards.functions import choose_rewards
from polyrhythm.config import RewardConfig
from polyrhythm.rewards.sandbox.frames import GroupToScore, WorkerSetup
from polyrhythm.rewards.sandbox.hosting import host_functions
from polyrhythm.rewards.sandbox.pool import RewardPool

def hangs(completions):
    print(os.getpid(), os.getppid(), flush=True)
    time.sleep(600)

async def main(names):
    setup = WorkerSetup(choose_rewards(RewardConfig(functions=names), None))
    async with RewardPool(setup, 1, 600) as rewards:
        await rewards.score(GroupToScore({}, "", [""], [[]], ["stop"]))

with host_functions([hangs]) as names:
    asyncio.run(main(names))
"""


def setup_of(names: list[str], **more) -> WorkerSetup:
    return WorkerSetup(choose_rewards(RewardConfig(functions=names), None), **more)


def group_of(*texts: str, **columns) -> GroupToScore:
    return GroupToScore(columns, "2+2=", list(texts), [[52] for _ in texts], ["stop" for _ in texts])


async def score(functions: list, *texts: str, deadline_s: float = 20.0, **columns) -> GroupScores:
    with host_functions(functions) as names:
        async with RewardPool(setup_of(names), num_workers=1, deadline_s=deadline_s) as rewards:
            return await rewards.score(group_of(*texts, **columns))


async def test_lambdas_and_closures_are_scored_as_they_are_with_what_they_hold():
    lock, longest = threading.Lock(), {"seen": 3}  # a lock cannot be pickled

    def by_length(completions, answer):
        with lock:
            return [len(text) / longest["seen"] for text in completions]

    async def later(completions):
        return [float(text == "four") for text in completions]

    class Judge:
        def __call__(self, completions):
            return [10.0 for _ in completions]

    halved = functools.partial(lambda factor, completions: [factor for _ in completions], 0.5)
    functions = [by_length, lambda completions: [1.0 for _ in completions], lambda completions: [2.0, None], later]
    scores = await score([*functions, Judge(), halved, addition.exact_match], "4", "four", answer="4")
    assert scores.scores == {
        "by_length": [1 / 3, 4 / 3],
        "lambda": [1.0, 1.0],
        "lambda_2": [2.0, None],
        "later": [0.0, 1.0],
        "Judge": [10.0, 10.0],
        "lambda_3": [0.5, 0.5],
        "exact_match": [1.0, 0.0],
    }


def test_what_a_worker_can_import_is_named_and_needs_no_host(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("def score(completions): return [1.0 for _ in completions]\n")
    monkeypatch.syspath_prepend(tmp_path)
    import beside  # pyright: ignore

    assert importable_name(addition.exact_match) == "polyrhythm.tasks.addition:exact_match"
    assert importable_name(beside.score) == f"{tmp_path}/beside.py:score"
    assert importable_name(lambda completions: []) is None
    monkeypatch.chdir(tmp_path)
    assert importable_name(beside.score) == "beside:score"
    with host_functions([beside.score, "my_rewards:other"]) as names:
        assert names == ["beside:score", "my_rewards:other"]
        assert not psutil.Process().children()


def test_signatures_are_known_before_a_run_even_where_an_event_loop_runs():
    def needs_two(completions, answer, *, unit):
        return []

    async def in_a_loop():
        with host_functions([needs_two]) as names:
            return import_in_worker(setup_of(names))

    (signature,) = asyncio.run(in_a_loop())
    assert signature.required == ["answer", "unit"]


async def test_a_forked_worker_sees_only_the_variables_it_may_see_and_has_limits(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("JUDGE_KEY", "key")

    def sees(completions):
        return [float("HF_TOKEN" in os.environ), float("JUDGE_KEY" in os.environ)]

    def takes_memory(completions):
        return [len(bytearray(2**30)) for _ in completions]

    with host_functions([sees, takes_memory]) as names:
        setup = setup_of(names, memory_mb=500, environment=["JUDGE_KEY"])
        async with RewardPool(setup, num_workers=1, deadline_s=20) as rewards:
            scores = await rewards.score(group_of("a", "b"))
    assert scores.scores["sees"] == [0.0, 1.0]
    assert "MemoryError" in scores.failures[0].error


async def test_a_forked_worker_that_hangs_or_dies_is_killed_and_replaced_with_all_that_it_started():
    def starts_and_hangs(completions):
        if completions == ["hangs"]:
            subprocess.Popen(["sleep", "654"])
            time.sleep(600)
        if completions == ["dies"]:
            os._exit(7)
        return [float(os.getpid()) for _ in completions]

    with host_functions([starts_and_hangs]) as names:
        async with RewardPool(setup_of(names), num_workers=1, deadline_s=1) as rewards:
            before = (await rewards.score(group_of("a"))).rewards[0]
            failed = [(await rewards.score(group_of(text))).failures[0].error for text in ("hangs", "dies")]
            after = (await rewards.score(group_of("a"))).rewards[0]
            assert rewards.num_workers_lost == 2 + 3
    assert failed == ["the reward took longer than 1 s", "the reward worker died"]
    assert before and after and before != after
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "654"]]
    assert not psutil.Process().children() and not psutil.pid_exists(int(after))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_host_and_workers_end_with_a_script_that_is_killed(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    script = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )  # fmt: skip
    try:
        assert script.stderr is not None
        processes = [psutil.Process(int(pid)) for pid in script.stderr.readline().split()]
        assert len(processes) == 2 and processes[1].ppid() == script.pid
    finally:
        script.kill()
        script.communicate(timeout=10)
    assert not psutil.wait_procs(processes, timeout=10)[1]


async def test_functions_of_a_script_that_has_ended_are_told_from_others():
    setup = WorkerSetup([RewardFunction("/nowhere/script.sock:score", "score")])
    said = r"functions of a script or a notebook that has ended.*polyrhythm\.train\(resume=\.\.\., rewards="
    with pytest.raises(UserError, match=said):
        import_in_worker(setup)
    with pytest.raises(RunError, match=said):
        async with RewardPool(setup, num_workers=1, deadline_s=1):
            pass
