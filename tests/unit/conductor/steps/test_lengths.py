from polyrhythm.conductor.steps.lengths import LengthHistory
from polyrhythm.types import Completion, Group, Problem, Rollout, Trace


def group(problem_index: int, *lengths: int) -> Group:
    traces = [Trace.of(Completion([1] * length, [-1.0] * length, "stop")) for length in lengths]
    return Group(0, 0, problem_index, [1], [Rollout(i, trace, 0) for i, trace in enumerate(traces)])


def order_of(history: LengthHistory, *indices: int) -> list[int]:
    return history.dispatch_order([Problem(index, "?") for index in indices])


def test_without_history_the_problem_order_stays():
    assert order_of(LengthHistory(), 5, 3, 9) == [0, 1, 2]


def test_the_longest_go_first_and_new_problems_count_as_average():
    history = LengthHistory()
    history.observe(group(1, 10, 20))
    history.observe(group(2, 100))
    history.observe(group(3, 2))
    assert order_of(history, 3, 7, 1, 2) == [3, 1, 2, 0], "the average is 39"


def test_the_last_visit_counts():
    history = LengthHistory()
    history.observe(group(1, 100))
    history.observe(group(2, 50))
    history.observe(group(1, 10))
    assert order_of(history, 1, 2) == [1, 0]
