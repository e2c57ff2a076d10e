import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from polyrhythm.config import RewardConfig
from polyrhythm.errors import RunError, UserError
from polyrhythm.rewards.checks import import_in_worker
from polyrhythm.rewards.functions import choose_rewards, make_function
from polyrhythm.rewards.sandbox.frames import GroupScores, GroupToScore, RewardFailure, RewardFunction, WorkerSetup
from polyrhythm.rewards.sandbox.pool import RewardPool

SAMPLES = "reward_samples"
HANGING_PARENT = """
import asyncio
from polyrhythm.rewards.sandbox.frames import GroupToScore, RewardFunction, WorkerSetup
from polyrhythm.rewards.sandbox.pool import RewardPool

async def main():
    setup = WorkerSetup([RewardFunction("reward_samples:hangs_holding_the_lock", "hangs")])
    async with RewardPool(setup, 1, 600) as rewards:
        asking = asyncio.create_task(rewards.score(GroupToScore({}, "", [""], [[]], ["stop"])))
        await asyncio.sleep(0.3)
        print("asked", flush=True)
        await asking

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def samples_in_the_working_directory(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)


def setup_of(*names: str, memory_mb: int = 0) -> WorkerSetup:
    return WorkerSetup([RewardFunction(f"{SAMPLES}:{name}", name) for name in names], memory_mb)


def group_of(*texts: str, **columns) -> GroupToScore:
    return GroupToScore(columns, "2+2=", list(texts), [[52, 10] for _ in texts], ["stop" for _ in texts])


async def score(*names: str, deadline_s: float = 20.0, texts: tuple[str, ...] = ("4",), **columns) -> GroupScores:
    async with RewardPool(setup_of(*names), num_workers=1, deadline_s=deadline_s) as rewards:
        return await rewards.score(group_of(*texts, **columns))


def only_failure(scores: GroupScores) -> RewardFailure:
    (failure,) = scores.failures.values()
    return failure


@pytest.mark.parametrize("name", ["bare_assert", "dies", "raises_half_a_character"])
async def test_a_reward_that_fails_excludes_its_rollout_and_says_why(name):
    said = {"bare_assert": "AssertionError", "dies": "worker died", "raises_half_a_character": "ValueError: ?"}
    scores = await score(name)
    assert scores.rewards == [None]
    assert said[name] in only_failure(scores).error


async def test_an_assert_without_a_message_shows_the_line_that_failed():
    error = only_failure(await score("bare_assert")).error
    assert error.startswith("AssertionError: assert completions[0] == answer  # no message (reward_samples.py:")


async def test_the_traceback_leads_through_the_code_of_the_reward_and_through_nothing_of_ours():
    result = only_failure(await score("raises_deep_inside"))
    assert result.error.startswith("ValueError: invalid literal for int()")
    assert result.traceback is not None and result.traceback.startswith("Traceback (most recent call last):")
    assert "in raises_deep_inside" in result.traceback and "in _parse" in result.traceback
    assert "scoring.py" not in result.traceback and "calling.py" not in result.traceback
    assert result.traceback.endswith("'4x'")


async def test_errors_of_one_line_have_one_origin_whatever_their_values():
    first, second = (await score("raises_deep_inside", texts=("a", "b"))).failures.values()
    assert first.error != second.error and first.origin == second.origin
    assert only_failure(await score("raises")).origin != first.origin


async def test_a_reward_that_hangs_is_killed_and_the_pool_goes_on():
    async with RewardPool(setup_of("hangs_holding_the_lock"), num_workers=1, deadline_s=0.3) as rewards:
        results = [await rewards.score(group_of("")) for _ in range(2)]
        assert rewards.num_workers_lost == 4
    assert [only_failure(result).error for result in results] == ["the reward took longer than 0.3 s"] * 2
    assert not psutil.Process().children()


@pytest.mark.parametrize("name", ["dies_once", "hangs_once"])
async def test_a_worker_that_is_lost_once_costs_one_more_attempt(name, tmp_path):
    result = await score(name, deadline_s=2.0, marker=str(tmp_path / "marker"), texts=("4", "5"))
    assert (tmp_path / "marker").exists()
    assert result.rewards == [1.0, 1.0] and not result.failures


@pytest.mark.parametrize("name", ["dies_of_a_bad_one", "hangs_for_a_bad_one"])
async def test_a_completion_that_a_worker_is_lost_over_again_and_again_fails_alone(name):
    scores = await score(name, deadline_s=1.0, texts=("good", "bad", "better"))
    assert scores.rewards == [4.0, None, 6.0] and scores.scores == {name: [4.0, None, 6.0]}
    assert list(scores.failures) == [1]


async def test_a_worker_that_cannot_be_started_again_fails_its_rollouts_and_not_the_run(monkeypatch):
    async def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    async with RewardPool(setup_of("dies"), num_workers=1, deadline_s=20) as rewards:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
        scores = await rewards.score(group_of(""))
    assert "a reward worker cannot be started" in only_failure(scores).error


async def test_workers_end_with_the_pool():
    async with RewardPool(setup_of("process_id"), num_workers=2, deadline_s=20) as rewards:
        pid = int((await rewards.score(group_of(""))).rewards[0] or 0)
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


async def test_groups_that_wait_are_put_together_for_a_function_that_wants_several():
    async with RewardPool(setup_of("how_many_at_once", "how_many"), num_workers=1, deadline_s=20) as rewards:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(rewards.score(group_of("a", "b"))) for _ in range(11)]
    scores = [task.result().scores for task in asked]
    # The first found a worker idle; while it was scored, the others waited.
    assert [group["how_many_at_once"] for group in scores] == [[2.0, 2.0]] + [[16.0, 16.0]] * 8 + [[4.0, 4.0]] * 2
    assert [group["how_many"] for group in scores] == [[2.0, 2.0]] * 11


async def test_who_stops_waiting_for_a_score_leaves_the_others_theirs():
    async with RewardPool(setup_of("how_many"), num_workers=1, deadline_s=20) as rewards:
        asked = [asyncio.create_task(rewards.score(group_of("a"))) for _ in range(3)]
        await asyncio.sleep(0)
        asked[1].cancel()
        assert (await asked[2]).rewards == [1.0]


async def test_who_asks_again_at_once_does_not_take_the_turn_of_one_who_waits():
    async def ask_often(rewards: RewardPool) -> int:
        return sum([len((await rewards.score(group_of("4", answer="4"))).rewards) for _ in range(5)])

    async with RewardPool(setup_of("exact"), num_workers=1, deadline_s=20) as rewards, asyncio.timeout(15):
        assert await asyncio.gather(*(ask_often(rewards) for _ in range(3))) == [5, 5, 5]


async def test_a_worker_does_not_see_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert (await score("environment", variable="HF_TOKEN")).rewards == [0]
    assert (await score("environment", variable="PATH")).rewards == [1]


async def test_a_worker_sees_the_variables_that_are_named(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    setup = WorkerSetup(setup_of("environment").functions, environment=["JUDGE_KEY"])
    import_in_worker(setup)
    async with RewardPool(setup, num_workers=1, deadline_s=20) as rewards:
        assert (await rewards.score(group_of("", variable="JUDGE_KEY"))).rewards == [1]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(UserError, match=r"reward\.environment has 'JUDGE_KEY', which is not set"):
        import_in_worker(setup)


@pytest.mark.parametrize("value", [object(), "\ud800", 2**70])
async def test_columns_that_cannot_be_sent_exclude_the_rollout(value):
    assert "columns cannot be sent" in only_failure(await score("everything", answer=value)).error


async def test_a_worker_has_limits(tmp_path):
    async with RewardPool(setup_of("takes_memory", memory_mb=800), num_workers=1, deadline_s=20) as rewards:
        assert "MemoryError" in only_failure(await rewards.score(group_of(""))).error
    large = str(tmp_path / "large")
    assert "File too large" in only_failure(await score("writes_a_large_file", path=large)).error


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
        async with RewardPool(WorkerSetup([RewardFunction("no_such_module:f", "f")]), num_workers=1, deadline_s=1):
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
        make_function(RewardFunction(spec, "f"))
    with pytest.raises(UserError) as checked:
        import_in_worker(WorkerSetup([RewardFunction(spec, "f")]))
    assert message in str(resolved.value)
    assert message in str(checked.value)


def test_a_module_that_ends_the_process_on_import_is_the_users_error(tmp_path, monkeypatch):
    (tmp_path / "quits.py").write_text("import os\nos.write(2, b'cannot go on')\nos._exit(3)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"\(exit code 3\) on importing it: cannot go on"):
        import_in_worker(WorkerSetup([RewardFunction("quits:f", "f")]))


def test_a_worker_says_which_columns_a_reward_cannot_do_without():
    setup = setup_of("exact", "needs_two", "everything", "asynchronous", "logs", "compute_score", "no_score")
    assert [(s.function, s.required) for s in import_in_worker(setup)] == [
        (f"{SAMPLES}:exact", ["answer"]),
        (f"{SAMPLES}:needs_two", ["answer", "unit"]),
        (f"{SAMPLES}:everything", []),
        (f"{SAMPLES}:asynchronous", []),
        (f"{SAMPLES}:logs", []),
        (f"{SAMPLES}:compute_score", ["data_source", "ground_truth"]),
        (f"{SAMPLES}:no_score", []),
    ]


def test_the_functions_of_the_configuration_come_before_the_tasks_own():
    def chosen(own: str | None, **config) -> list[tuple[str, float]]:
        return [(reward.spec, reward.weight) for reward in choose_rewards(RewardConfig(**config), own)]

    assert chosen("task:own") == [("task:own", 1.0)]
    assert chosen("task:own", functions=["a:b", "c:d"]) == [("a:b", 1.0), ("c:d", 1.0)]
    assert chosen(None, functions=["a:b"], weights=[0.3]) == [("a:b", 0.3)]
    with pytest.raises(UserError, match=r"reward\.functions is empty and the task has no reward of its own"):
        chosen(None)
