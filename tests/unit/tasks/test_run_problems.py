"""Which problems a run trains on: what is held out, dropped, mixed, and how often it may go through them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.config import Config
from polyrhythm.errors import UserError
from polyrhythm.tasks import ProblemStream, PromptText, choose_problems, open_problems
from polyrhythm.tasks.mixture import BLOCK, Mixture, share_out
from polyrhythm.tasks.problems import find_too_long, hold_out, problems_to_check, say_too_long
from polyrhythm.tasks.task import Part
from polyrhythm.tokenizer import Tokenizer
from polyrhythm.types import Problem


class Numbered:
    """A prompt of `index` letters."""

    reward = None
    stop = ()
    correct_above = None

    def __init__(self, num_problems: int | None, parts: list[Part] | None = None) -> None:
        self.num_problems = num_problems
        self.parts = parts or []

    def problem(self, index: int) -> Problem:
        return Problem(index, "x" * (index + 1))


def config_of(**values: Any) -> Config:
    return Config.model_validate({"num_steps": 2, "rollout": {"groups_per_step": 5, "max_tokens": 16}, **values})


def taken(numbered: Numbered, n: int, **values: Any) -> list[int]:
    stream = choose_problems(config_of(**values), numbered, []).stream
    return [problem.index for problem in stream.take(0, n)]


def test_without_shuffling_problems_come_in_their_own_order_epoch_after_epoch() -> None:
    assert taken(Numbered(4), 10, task={"shuffle": False}) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_held_out_problems_are_never_taken_whatever_the_seed() -> None:
    task = Numbered(40)
    held_out = choose_problems(config_of(task={"holdout": 0.25}), task, []).held_out
    assert len(held_out) == 10 and held_out == sorted(held_out) != list(range(10))
    for seed in (0, 7):
        epoch = taken(task, 30, task={"holdout": 0.25}, seed=seed)
        assert Counter(epoch + held_out) == Counter(range(40))
    assert set(hold_out(task, 0.1)) < set(hold_out(task, 0.25))


@pytest.mark.parametrize(
    ("num_problems", "holdout", "message"),
    [(3, 0.1, "of 3 problems is 0: none or all"), (None, 0.1, "no end"), (2, 0.9, "of 2 problems is 2: none or all")],
)
def test_a_share_that_holds_out_none_or_all_is_refused(num_problems: int | None, holdout: float, message: str) -> None:
    with pytest.raises(UserError, match=message):
        hold_out(Numbered(num_problems), holdout)


def test_dropped_problems_are_in_no_epoch_and_not_held_out_either() -> None:
    values: dict[str, Any] = {"task": {"holdout": 0.5}, "prompt": {"too_long": "drop"}}
    task, too_long = Numbered(20), [3, 4, 5, 6, 7, 8, 9]
    problems = choose_problems(config_of(**values), task, too_long)
    trained = {problem.index for problem in problems.stream.take(0, 60)}
    assert trained | set(problems.held_out) == set(range(20)) - set(too_long)
    assert not trained & set(problems.held_out)
    with pytest.raises(UserError, match="there are no problems left to train on: 20 of 20 are too long"):
        choose_problems(config_of(prompt={"too_long": "drop"}), task, list(range(20)))


def test_more_epochs_than_allowed_are_refused_with_the_number_of_steps_that_fit() -> None:
    choose_problems(config_of(task={"epochs": 2}), Numbered(5), [])
    with pytest.raises(UserError, match=r"num_steps=3 .* 5 problems 3.00 times, and task.epochs=2: use num_steps=2"):
        choose_problems(config_of(num_steps=3, task={"epochs": 2}), Numbered(5), [])
    with pytest.raises(UserError, match=r"task.epochs=1: lower rollout.groups_per_step"):
        choose_problems(config_of(task={"epochs": 1}), Numbered(4), [])
    with pytest.raises(UserError, match="no epochs"):
        choose_problems(config_of(task={"epochs": 1}), Numbered(None), [])


def test_the_epochs_of_a_mixture_are_those_of_the_part_gone_through_most() -> None:
    task = Numbered(1100, [Part(range(1000), 1), Part(range(1000, 1100), 1)])
    stream = ProblemStream(task, seed=0)
    assert stream.epochs_after(BLOCK) == 5.0
    most = max(Counter(problem.index >= 1000 for problem in stream.take(0, 300)).items())[1]
    assert stream.epochs_after(300) == pytest.approx(most / 100)


def test_too_long_prompts_are_found_said_and_dropped(tiny_model_dir: Path) -> None:
    task = Numbered(30)
    config = config_of(engine={"context_length": 36}, prompt={"too_long": "drop"})
    text = PromptText(Tokenizer(tiny_model_dir), config)
    assert find_too_long(config, task, text, problems_to_check(config, task)) == list(range(20, 30))
    assert {problem.index for problem in open_problems(config, task, text).stream.take(0, 100)} == set(range(20))
    (line,) = say_too_long(config, task, text, 10)
    assert line.startswith("10 of 30 prompts are longer than 20 tokens: their problems are left out")


@pytest.mark.parametrize(
    ("too_long", "num_problems", "fix"),
    [("drop", None, 'to "truncate" (of a task without an end'), ("error", 30, 'to "drop" or "truncate"')],
)
def test_a_prompt_that_is_too_long_names_the_ways_out(
    tiny_model_dir: Path, too_long: str, num_problems: int | None, fix: str
) -> None:
    task = Numbered(num_problems)
    config = config_of(engine={"context_length": 36}, prompt={"too_long": too_long})
    text = PromptText(Tokenizer(tiny_model_dir), config)
    with pytest.raises(UserError) as caught:
        find_too_long(config, task, text, problems_to_check(config, task))
    assert "problem 20 of task 'addition' has a prompt of 21 tokens" in str(caught.value) and fix in str(caught.value)
    assert "raise engine.context_length" in str(caught.value)


@given(
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
    seed=st.integers(0, 3),
    cursor=st.integers(0, 2 * BLOCK + 7),
)
def test_a_mixture_is_a_function_of_the_position_alone(weights: list[float], seed: int, cursor: int) -> None:
    in_order = Mixture(weights, seed)
    places = [in_order.at(position) for position in range(cursor + 1)]
    assert Mixture(weights, seed).at(cursor) == places[-1]
    counted: Counter[int] = Counter()
    for place in places:
        assert place.nth == counted[place.part]
        counted[place.part] += 1
    assert in_order.taken(cursor + 1) == [counted[part] for part in range(len(weights))]


def test_a_block_has_every_part_by_its_weight() -> None:
    assert share_out([1, 1, 1]) == [334, 333, 333]
    assert share_out([0.7, 0.2, 0.1]) == [700, 200, 100]
