"""The order of problems."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.tasks import ProblemStream
from polyrhythm.types import Problem, rollout_seed


class NumberedTask:
    reward = "nowhere:nothing"
    stop = ()
    correct_above = None

    def __init__(self, num_problems: int | None) -> None:
        self.num_problems = num_problems

    def problem(self, index: int) -> Problem:
        return Problem(index=index, prompt=f"problem {index}")


def indices(num_problems: int | None, seed: int, cursor: int, n: int) -> list[int]:
    return [problem.index for problem in ProblemStream(NumberedTask(num_problems), seed).take(cursor, n)]


@given(num_problems=st.integers(1, 40), seed=st.integers(0, 5), num_epochs=st.integers(1, 3))
def test_every_epoch_holds_every_problem_once(num_problems: int, seed: int, num_epochs: int) -> None:
    for epoch in range(num_epochs):
        assert Counter(indices(num_problems, seed, epoch * num_problems, num_problems)) == Counter(range(num_problems))


@given(num_problems=st.none() | st.integers(1, 20), takes=st.lists(st.integers(0, 9), max_size=8))
def test_a_stream_resumed_at_any_cursor_goes_on_as_if_never_stopped(num_problems: int | None, takes: list[int]) -> None:
    resumed, cursor = [], 0
    for n in takes:
        resumed += indices(num_problems, 1, cursor, n)
        cursor += n
    assert resumed == indices(num_problems, 1, 0, cursor)


def test_epochs_and_seeds_differ_in_order() -> None:
    orders = [indices(30, 0, 0, 30), indices(30, 0, 30, 30), indices(30, 1, 0, 30)]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_an_endless_task_is_read_in_order_and_seeds_never_meet() -> None:
    assert indices(None, 0, 5, 3) == [5, 6, 7]
    assert not set(indices(None, 0, 0, 1000)) & set(indices(None, 1, 0, 1000))


def test_a_step_back_to_an_earlier_epoch_repeats_it() -> None:
    stream = ProblemStream(NumberedTask(10), seed=0)
    first = stream.take(0, 10)
    stream.take(10, 10)
    assert stream.take(0, 10) == first


def test_a_problem_that_comes_twice_in_one_step_has_rollouts_of_its_own_each_time():
    problems = ProblemStream(NumberedTask(3), seed=0).take(0, 6)
    identities = [(problem.index, problem.epoch) for problem in problems]
    assert sorted(identities) == [(index, epoch) for index in range(3) for epoch in range(2)]
    seeds = [rollout_seed(0, 0, problem.index, 0, problem.epoch) for problem in problems]
    assert len(set(seeds)) == 6
