"""The addition task."""

import re

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
        a, b = map(int, re.fullmatch(r"(\d+) \+ (\d+) = ", question).groups())  # type: ignore[union-attr]
        assert problem.columns == {"answer": str(a + b)}
        assert not any(line.startswith(question) for line in solved)


def test_digits_and_shots_set_the_difficulty() -> None:
    prompts = [str(Addition(digits=3, shots=1).problem(index).prompt) for index in range(200)]
    assert {prompt.count("\n") for prompt in prompts} == {1}
    assert max(int(number) for prompt in prompts for number in re.findall(r"(\d+) \+", prompt)) in range(900, 1000)


def test_another_seed_gives_other_problems() -> None:
    assert Addition(seed=1).problem(0).prompt != Addition(seed=2).problem(0).prompt


def test_only_the_exact_first_line_is_rewarded() -> None:
    completions = ["46\n", "46", " 46 \n7", "46.", "460\n", "4\n6", ""]
    assert exact_match(completions, ["46"] * 7, prompts=["12 + 34 = "] * 7) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
