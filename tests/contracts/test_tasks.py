"""What every registered task promises."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from polyrhythm.config import TaskConfig
from polyrhythm.tasks import TASKS, ProblemStream, Task, make_task
from polyrhythm.types import Problem

LINES = "\n".join(f'{{"prompt": "{number}+1=", "answer": {number + 1}}}' for number in range(7))


@pytest.fixture(params=list(TASKS))
def config(request: pytest.FixtureRequest, tmp_path: Path) -> TaskConfig:
    (tmp_path / "problems.jsonl").write_text(LINES, encoding="utf-8")
    needed: dict[str, dict[str, Any]] = {
        "dataset": {"path": str(tmp_path / "problems.jsonl")},
        "reasoning_gym": {"dataset": "chain_sum", "size": 9},
    }
    return TaskConfig(name=request.param, options=needed.get(request.param, {}))


def some_problems(task: Task) -> list[Problem]:
    return [task.problem(index) for index in range(min(task.num_problems or 7, 7))]


def test_the_same_index_is_the_same_problem_twice_and_in_another_task_of_the_same_options(
    config: TaskConfig,
) -> None:
    task = make_task(config)
    assert some_problems(task) == some_problems(task) == some_problems(make_task(config))
    assert [problem.index for problem in some_problems(task)] == list(range(len(some_problems(task))))


def test_different_indices_are_different_problems(config: TaskConfig) -> None:
    prompts = [str(problem.prompt) for problem in some_problems(make_task(config))]
    assert len(set(prompts)) == len(prompts)


def test_problems_survive_the_wire(config: TaskConfig) -> None:
    problems = some_problems(make_task(config))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(problems), type=list[Problem]) == problems


def test_the_stream_resumes_in_a_new_process_where_it_stopped(config: TaskConfig) -> None:
    whole = ProblemStream(make_task(config), seed=3).take(0, 20)
    assert ProblemStream(make_task(config), seed=3).take(9, 11) == whole[9:]


def test_the_reward_and_the_stop_strings_have_the_agreed_form(config: TaskConfig) -> None:
    task = make_task(config)
    if task.reward is not None:
        module, colon, function = task.reward.partition(":")
        assert module and colon and function.isidentifier()
    assert isinstance(task.stop, tuple) and all(isinstance(text, str) and text for text in task.stop)
    assert task.correct_above is None or isinstance(task.correct_above, float)
