import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from polyrhythm.config import RewardConfig
from polyrhythm.errors import RunError, UserError
from polyrhythm.rewards.functions import choose_rewards, import_in_worker, resolve_reward
from polyrhythm.rewards.sandbox.frames import RewardResult
from polyrhythm.rewards.sandbox.pool import RewardPool

SAMPLES = "reward_samples"
HANGING_PARENT = """
import asyncio
from polyrhythm.rewards.sandbox.pool import RewardPool

async def main():
    async with RewardPool({"reward_samples:hangs_holding_the_lock": 1.0}, 1, 600) as rewards:
        asking = asyncio.create_task(rewards.score({}, "", "", []))
        await asyncio.sleep(0.3)
        print("asked", flush=True)
        await asking

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def samples_in_the_working_directory(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)


async def score(name: str, deadline_s: float = 20.0, **columns) -> RewardResult:
    async with RewardPool({f"{SAMPLES}:{name}": 1.0}, num_workers=1, deadline_s=deadline_s) as rewards:
        return await rewards.score(columns, "2+2=", "4", [52, 10])


@pytest.mark.parametrize(
    ("name", "columns", "reward"),
    [
        ("exact", {"answer": "4", "not_asked_for": 1}, 1.0),
        ("exact", {"answer": "5"}, 0.0),
        ("everything", {"a": 1, "b": 2}, 5.0),
        ("bare_number", {}, 1.0),
        ("asynchronous", {}, 62.0),
        ("prints", {}, 1.0),
    ],
)
async def test_a_reward_gets_the_keywords_it_asks_for(name, columns, reward):
    assert await score(name, **columns) == RewardResult(reward=reward)


async def test_a_completion_of_messages_is_a_message():
    async with RewardPool({f"{SAMPLES}:of_messages": 1.0}, num_workers=1, deadline_s=20.0) as rewards:
        result = await rewards.score({}, [{"role": "user", "content": "2+2="}], "four", [52, 10])
    assert result == RewardResult(reward=4.0)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("raises", "KeyError: 'no such answer'"),
        ("raises_half_a_character", "ValueError: ?"),
        ("not_finite", "not a finite number"),
        ("nothing", "returned None"),
        ("two_values", "2 values for one completion"),
        ("text", "not a finite number"),
        ("exact", "missing 1 required positional argument: 'answer'"),
        ("dies", "worker died"),
    ],
)
async def test_a_reward_that_fails_excludes_its_rollout_and_says_why(name, error):
    result = await score(name)
    assert result.reward is None
    assert error in str(result.error)


async def test_an_assert_without_a_message_shows_the_line_that_failed():
    result = await score("bare_assert")
    assert result.error is not None
    assert result.error.startswith("AssertionError: assert completions[0] == answer  # no message (reward_samples.py:")


async def test_the_traceback_leads_through_the_code_of_the_reward_and_through_nothing_of_ours():
    result = await score("raises_deep_inside")
    assert result.error is not None and result.error.startswith("ValueError: invalid literal for int()")
    assert result.traceback is not None and result.traceback.startswith("Traceback (most recent call last):")
    assert "in raises_deep_inside" in result.traceback and "in _parse" in result.traceback
    assert "worker.py" not in result.traceback
    assert result.traceback.endswith("'4x'")


async def test_errors_of_one_line_have_one_origin_whatever_their_values():
    async with RewardPool({f"{SAMPLES}:raises_deep_inside": 1.0}, num_workers=1, deadline_s=20) as rewards:
        results = [await rewards.score({}, "", text, []) for text in ("a", "b")]
    assert results[0].error != results[1].error and results[0].origin == results[1].origin
    assert (await score("raises")).origin != results[0].origin


async def test_a_reward_that_hangs_is_killed_and_the_pool_goes_on():
    async with RewardPool({f"{SAMPLES}:hangs_holding_the_lock": 1.0}, num_workers=1, deadline_s=0.3) as rewards:
        results = [await rewards.score({}, "", "", []) for _ in range(2)]
        assert rewards.num_workers_lost == 4
    assert [result.error for result in results] == ["the reward took longer than 0.3 s"] * 2
    assert not psutil.Process().children()


@pytest.mark.parametrize("name", ["dies_once", "hangs_once"])
async def test_a_worker_that_is_lost_once_costs_one_more_attempt(name, tmp_path):
    result = await score(name, deadline_s=2.0, marker=str(tmp_path / "marker"))
    assert (tmp_path / "marker").exists()
    assert result == RewardResult(reward=1.0)


async def test_workers_end_with_the_pool():
    async with RewardPool({f"{SAMPLES}:process_id": 1.0}, num_workers=2, deadline_s=20) as rewards:
        pid = int((await rewards.score({}, "", "", [])).reward or 0)
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


async def test_a_worker_does_not_see_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert (await score("environment", variable="HF_TOKEN")).reward == 0
    assert (await score("environment", variable="PATH")).reward == 1


@pytest.mark.parametrize("value", [object(), "\ud800", 2**70])
async def test_columns_that_cannot_be_sent_exclude_the_rollout(value):
    assert "columns cannot be sent" in str((await score("everything", answer=value)).error)


async def test_a_worker_has_limits(tmp_path):
    async with RewardPool({f"{SAMPLES}:takes_memory": 1.0}, num_workers=1, deadline_s=20, memory_mb=800) as rewards:
        assert "MemoryError" in str((await rewards.score({}, "", "", [])).error)
    assert "File too large" in str((await score("writes_a_large_file", path=str(tmp_path / "large"))).error)


def test_a_worker_that_hangs_ends_with_the_process_that_started_it(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", HANGING_PARENT], stdout=subprocess.PIPE, cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"asked\n"
        (worker,) = psutil.Process(parent.pid).children()
        assert worker.is_running()
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()
    assert not psutil.wait_procs([worker], timeout=10)[1]


async def test_a_pool_whose_reward_cannot_be_imported_does_not_start():
    with pytest.raises(RunError, match="no_such_module"):
        async with RewardPool({"no_such_module:f": 1.0}, num_workers=1, deadline_s=1):
            pass


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_colon", "'no_colon' is not of the form module:function"),
        ("no_such_module:f", "'no_such_module:f' cannot be imported: No module named"),
        (f"{SAMPLES}:absent", f"'{SAMPLES}:absent': module '{SAMPLES}' has no attribute 'absent'"),
        (f"{SAMPLES}:__name__", "cannot be called"),
    ],
)
def test_a_reward_that_is_not_there_is_the_users_error(spec, message):
    with pytest.raises(UserError) as resolved:
        resolve_reward(spec)
    with pytest.raises(UserError) as checked:
        import_in_worker({spec: 1.0})
    assert message in str(resolved.value)
    assert message in str(checked.value)


def test_a_module_that_ends_the_process_on_import_is_the_users_error(tmp_path, monkeypatch):
    (tmp_path / "quits.py").write_text("import os\nos.write(2, b'cannot go on')\nos._exit(3)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"\(exit code 3\) on importing it: cannot go on"):
        import_in_worker({"quits:f": 1.0})


def test_a_worker_says_which_columns_a_reward_cannot_do_without():
    rewards = {f"{SAMPLES}:{name}": 1.0 for name in ("exact", "needs_two", "everything", "asynchronous")}
    assert [(s.function, s.required) for s in import_in_worker(rewards)] == [
        (f"{SAMPLES}:exact", ["answer"]),
        (f"{SAMPLES}:needs_two", ["answer", "unit"]),
        (f"{SAMPLES}:everything", []),
        (f"{SAMPLES}:asynchronous", []),
    ]


def test_a_good_reward_passes_the_check():
    import_in_worker({f"{SAMPLES}:exact": 1.0})
    assert resolve_reward(f"{SAMPLES}:exact")(["a"], ["a"]) == [1.0]
    assert os.getcwd() in sys.path or "" in sys.path


async def test_the_reward_is_the_weighted_sum_of_several_functions():
    rewards = {f"{SAMPLES}:exact": 2.0, f"{SAMPLES}:bare_number": -0.5}
    async with RewardPool(rewards, num_workers=1, deadline_s=20.0) as pool:
        assert await pool.score({"answer": "4"}, "2+2=", "4", [52, 10]) == RewardResult(reward=2.0 * 1.0 - 0.5 * 1.0)


async def test_one_function_that_raises_excludes_the_rollout():
    async with RewardPool({f"{SAMPLES}:exact": 1.0, f"{SAMPLES}:raises": 0.0}, num_workers=1, deadline_s=20.0) as pool:
        result = await pool.score({"answer": "4"}, "2+2=", "4", [52, 10])
    assert result.reward is None and "no such answer" in str(result.error)


def test_the_functions_of_the_configuration_come_before_the_tasks_own():
    assert choose_rewards(RewardConfig(), "task:own") == {"task:own": 1.0}
    assert choose_rewards(RewardConfig(functions=["a:b", "c:d"]), "task:own") == {"a:b": 1.0, "c:d": 1.0}
    assert choose_rewards(RewardConfig(functions=["a:b"], weights=[0.3]), None) == {"a:b": 0.3}
    with pytest.raises(UserError, match=r"reward\.functions is empty and the task has no reward of its own"):
        choose_rewards(RewardConfig(), None)
