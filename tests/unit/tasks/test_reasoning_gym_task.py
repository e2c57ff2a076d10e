"""reasoning-gym's problems, and its own rules for answers."""

import sys
from collections import Counter
from typing import Any

import msgspec
import pytest

from polyrhythm.config import TaskConfig
from polyrhythm.errors import UserError
from polyrhythm.tasks import ProblemStream, make_task
from polyrhythm.tasks.reasoning_gym import ReasoningGym, find_answer, score
from polyrhythm.types import Problem


def scored(problem: Problem, completion: Any) -> float:
    """As a worker calls it: after the way over the wire."""
    columns = msgspec.msgpack.decode(msgspec.msgpack.encode(problem.columns))
    return score([completion], **{name: [value] for name, value in columns.items()})[0]


@pytest.mark.parametrize("name", ["arc_1d", "basic_arithmetic", "chain_sum", "countdown", "rearc", "spell_backward"])
def test_the_right_answer_is_worth_one_and_none_less(name: str) -> None:
    problem = ReasoningGym(dataset=name, size=2).problem(1)
    assert problem.prompt == problem.columns["question"]
    assert scored(problem, f"I think\n<answer>{problem.columns['answer']}</answer>") == 1.0
    assert scored(problem, [{"role": "assistant", "content": f"so\n{problem.columns['answer']}"}]) > 0
    assert scored(problem, "") < 0.5


def test_options_of_the_dataset_reach_it_and_its_rule() -> None:
    task = ReasoningGym(dataset="chain_sum", size=20, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    for index in range(20):
        question = str(task.problem(index).prompt)
        assert sum(character in "+-" for character in question) == 1
    assert task.problem(0).columns["reasoning_gym"]["options"]["max_terms"] == 2
    assert scored(task.problem(0), task.problem(0).columns["answer"]) == 1.0


def test_a_list_is_mixed_by_weight() -> None:
    dataset = [{"name": "chain_sum", "weight": 3, "max_terms": 2}, "spell_backward"]
    task = make_task(TaskConfig(name="reasoning_gym", options={"dataset": dataset, "size": 40}))
    taken = ProblemStream(task, seed=1).take(0, 1000)
    kinds = Counter(problem.columns["metadata"]["source_dataset"] for problem in taken)
    assert kinds == {"chain_sum": 750, "spell_backward": 250}


def test_another_seed_gives_other_problems() -> None:
    assert ReasoningGym(dataset="chain_sum", seed=1).problem(0) != ReasoningGym(dataset="chain_sum").problem(0)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("", ""),
        ("<answer>1</answer> no, <answer> 2 </answer>.", "2"),
        ("<answer>cut off", "cut off"),
        ("first\nlast \n\n", "last"),
        ("one line", "one line"),
    ],
)
def test_the_answer_is_the_last_tag_or_the_last_line(completion: str, answer: str) -> None:
    assert find_answer(completion) == answer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "task.options.dataset is missing"),
        ({"dataset": "chain_sums"}, r"not one of the \d+ datasets of reasoning-gym; close to it are chain_sum"),
        ({"dataset": 5}, "give the name of a dataset"),
        ({"dataset": []}, "is empty"),
        ({"dataset": "chain_sum", "size": 0}, "task.options.size=0 must be a whole number from 1 on"),
        ({"dataset": "chain_sum", "terms": 3}, "chain_sum of reasoning-gym has the options min_terms, max_terms"),
        ({"dataset": "chain_sum", "max_terms": 0}, "chain_sum of reasoning-gym refuses"),
        (
            {"dataset": ["chain_sum"], "max_terms": 3},
            "task.options.max_terms: options of the datasets of a list stand in",
        ),
        ({"dataset": [{"name": "chain_sum", "weight": 0}]}, "the weight 0 of chain_sum must be a number above 0"),
    ],
)
def test_a_mistake_is_one_line_with_the_fix(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_task(TaskConfig(name="reasoning_gym", options=options))
    assert "\n" not in str(caught.value)


def test_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install 'polyrhythm\[reasoning-gym\]'"):
        ReasoningGym(dataset="chain_sum")
