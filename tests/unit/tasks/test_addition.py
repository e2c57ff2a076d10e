"""The addition task."""

import re

import pytest

from polyrhythm.tasks.addition import Addition, exact_match


def test_the_solved_sums_are_right_and_the_answer_is_that_of_the_last_one() -> None:
    for index in range(50):
        problem = Addition().problem(index)
        assert isinstance(problem.prompt, str)
        *solved, question = problem.prompt.split("\n")
        assert len(solved) == 4
        for line in solved:
            a, b, c = map(int, re.fullmatch(r"(\d+) \+ (\d+) = (\d+)", line).groups())  # type: ignore[union-attr]
            assert a + b == c
        a, b = map(int, re.fullmatch(r"(\d+) \+ (\d+) =", question).groups())  # type: ignore[union-attr]
        assert problem.columns == {"answer": str(a + b)}
        assert not any(line.startswith(question) for line in solved)


@pytest.mark.parametrize("digits", [2, 3])
def test_all_numbers_and_answers_have_the_digits_asked_for(digits: int) -> None:
    problems = [Addition(digits=digits, shots=1).problem(index) for index in range(100)]
    numbers = [number for problem in problems for number in re.findall(r"\d+", str(problem.prompt))]
    assert {len(number) for number in numbers} == {digits} == {len(problem.columns["answer"]) for problem in problems}
    assert {str(problem.prompt).count("\n") for problem in problems} == {1}


def test_the_largest_number_of_shots_finds_enough_sums_of_one_digit() -> None:
    assert str(Addition(digits=1, shots=16).problem(0).prompt).count("\n") == 16


def test_another_seed_gives_other_problems() -> None:
    assert Addition(seed=1).problem(0).prompt != Addition(seed=2).problem(0).prompt


def test_only_the_exact_first_line_is_rewarded() -> None:
    completions = ["46\n", "46", " 46 \n7", "46.", "460\n", "4\n6", ""]
    assert exact_match(completions, ["46"] * 7, prompts=["12 + 34 ="] * 7) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
