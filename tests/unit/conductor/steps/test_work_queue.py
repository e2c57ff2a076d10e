import math

import pytest

from polyrhythm.conductor.steps.work_queue import MAX_PAUSE_S, WorkQueue, pause_before_attempt


def test_work_goes_out_in_order_and_failed_work_comes_back_after_its_pause():
    queue = WorkQueue([2, 0, 1], jitter=lambda: 0.5)
    first = queue.pop()
    assert first.position == 2
    first.num_attempts = 1
    queue.put_back(first, now_s=10)
    assert [queue.pop().position, queue.pop().position] == [0, 1]
    assert len(queue) == 1
    assert queue.peek(now_s=10) is None
    assert queue.seconds_to_next(10) == pytest.approx(0.1)
    assert queue.peek(now_s=10.11) is first
    assert queue.pop() is first
    assert queue.seconds_to_next(11) == math.inf


def test_failed_work_goes_out_before_later_positions():
    queue = WorkQueue(range(3), jitter=lambda: 0.0)
    first = queue.pop()
    first.num_attempts = 1
    queue.put_back(first, now_s=0)
    assert queue.peek(now_s=1) is first


def test_pauses_double_and_are_spread_and_bounded():
    assert [pause_before_attempt(n, 0.5) for n in (1, 2, 3)] == [0.1, 0.2, 0.4]
    assert (pause_before_attempt(1, 0.0), pause_before_attempt(1, 1.0)) == (0.05, 0.15000000000000002)
    assert pause_before_attempt(60, 0.5) == MAX_PAUSE_S


def test_a_replaced_problem_starts_anew():
    queue = WorkQueue([0])
    work = queue.pop()
    work.num_attempts, work.refused_by, work.avoid = 3, {"engine-1"}, "engine-0"
    queue.start_anew(work)
    assert queue.pop() is work
    assert (work.num_attempts, work.refused_by, work.avoid) == (0, set(), "")
