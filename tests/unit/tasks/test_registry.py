"""Tasks found by name, and the messages for those that are not."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyrhythm.config import PromptConfig, TaskConfig
from polyrhythm.errors import UserError
from polyrhythm.tasks import make_task
from polyrhythm.tasks.addition import Addition
from polyrhythm.types import Problem


class Counting:
    """A task of somebody else's, without pydantic."""

    reward = "nowhere:nothing"
    stop = ()
    correct_above = None

    def __init__(self, upto: int) -> None:
        self.num_problems = upto

    def problem(self, index: int) -> Problem:
        return Problem(index=index, prompt=str(index))


class NoTask:
    pass


class Failing(Counting):
    """Its third problem cannot be made; its fourth is an array."""

    def __init__(self, upto: int = 4, broken: bool = False) -> None:
        if broken:
            raise RuntimeError("no such table")
        super().__init__(upto)

    def problem(self, index: int) -> Any:
        if index == 2:
            raise KeyError("question")
        return {0: Problem(0, "fine"), 1: {"prompt": "a dict"}, 3: Problem(3, np.array(["hi"]))}[index]  # type: ignore[arg-type]


def test_what_a_task_raises_or_returns_is_named_with_the_problem() -> None:
    task = make_task(TaskConfig(name=f"{__name__}:Failing"))
    assert task.problem(0).prompt == "fine"
    for index, message in (
        (1, "is a dict: problem() must return a polyrhythm.types.Problem"),
        (2, "cannot be made: KeyError: 'question'"),
        (3, "the prompt is a ndarray of numpy or pandas"),
    ):
        with pytest.raises(UserError, match=re.escape(f"problem {index} of task '{__name__}:Failing'")) as caught:
            task.problem(index)
        assert message in str(caught.value)


def test_prompts_are_in_the_form_asked_for() -> None:
    config = TaskConfig(name=f"{__name__}:Counting", options={"upto": 3})
    assert make_task(config, PromptConfig(form="chat")).problem(2).prompt == [{"role": "user", "content": "2"}]
    with pytest.raises(UserError, match=r"problem 0 of task .*: prompt.template has \{colour\}"):
        make_task(config, PromptConfig(template="{colour}")).problem(0)


def test_a_builtin_task_takes_its_options() -> None:
    assert make_task(TaskConfig(name="addition", options={"digits": 3})).task == Addition(digits=3)


def test_a_class_of_somebody_elses_is_found_by_module_and_name() -> None:
    task = make_task(TaskConfig(name=f"{__name__}:Counting", options={"upto": 3}))
    assert task.num_problems == 3


def test_a_class_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "task_from_here.py").write_text(f"from {__name__} import Counting", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert make_task(TaskConfig(name="task_from_here:Counting", options={"upto": 3})).num_problems == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing", {}, "task.name='nothing' is not a task: use addition, dataset, reasoning_gym or module:name"),
        ("jsonl", {}, 'task.name = "jsonl" was renamed to task.name = "dataset"'),
        ("no_such_module:Task", {}, "task.name='no_such_module:Task' cannot be imported"),
        ("json:NoSuchClass", {}, "task.name='json:NoSuchClass' cannot be imported"),
        ("json:dumps", {}, "task.name='json:dumps' is not a class"),
        (f"{__name__}:NoTask", {}, "it needs problem(), num_problems, reward, stop and correct_above"),
        (f"{__name__}:Counting", {}, "task.options.upto is missing"),
        (
            f"{__name__}:Failing",
            {"broken": True},
            "cannot be made with task.options={'broken': True}: RuntimeError: no such",
        ),
        (f"{__name__}:Counting", {"upto": 0}, "has no problems with task.options={'upto': 0}"),
        (f"{__name__}:Counting", {"up": 1}, "task.options.up=1 is not an option of task"),
        ("addition", {"digit": 2}, "task.options.digit=2 is not an option of task 'addition': it has digits, shots"),
        ("addition", {"digits": 0}, "task.options.digits=0 is wrong: Input should be greater than or equal to 1"),
        ("addition", {"digits": "two"}, "task.options.digits='two' is wrong: Input should be a valid integer"),
        ("dataset", {}, "task.options.path is missing"),
        ("dataset", {"path": "x", "reward": "a:b"}, "task.options.reward was renamed to reward.functions"),
    ],
)
def test_a_mistake_is_answered_with_the_key_and_the_fix(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        make_task(TaskConfig(name=name, options=options))
