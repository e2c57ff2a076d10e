import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.conductor.steps.ledger import Ledger, Verdict
from polyrhythm.types import Completion, Trace, Turn

GOOD = Trace.of(Completion(token_ids=[1, 2], rollout_logprobs=[-0.1, -0.2], finish_reason="stop"))


def make_ledger(num_groups: int = 2, group_size: int = 2) -> Ledger:
    return Ledger(version=3, num_groups=num_groups, group_size=group_size, vocab_size=10, max_tokens=3)


def test_a_group_is_complete_when_all_its_rollouts_are_in():
    ledger = make_ledger()
    assert ledger.accept(0, 1, 3, GOOD)[0] is Verdict.ACCEPTED
    assert ledger.missing(0) == [0]
    assert ledger.accept(0, 0, 3, GOOD)[0] is Verdict.ACCEPTED
    assert ledger.missing(0) == []
    assert ledger.traces(0) == [GOOD, GOOD]
    assert not ledger.is_complete


@pytest.mark.parametrize("version", [2, 4, -1])
def test_a_rollout_of_another_version_is_refused_and_counted(version):
    ledger = make_ledger()
    assert ledger.accept(0, 0, version, GOOD)[0] is Verdict.WRONG_VERSION
    assert (ledger.num_violations, ledger.num_accepted, ledger.missing(0)) == (1, 0, [0, 1])


def test_the_first_rollout_of_an_id_counts_and_later_ones_are_dropped():
    ledger = make_ledger()
    other = Trace.of(Completion(token_ids=[9], rollout_logprobs=[-1.0], finish_reason="length"))
    ledger.accept(0, 0, 3, GOOD)
    assert ledger.accept(0, 0, 3, other)[0] is Verdict.DUPLICATE
    ledger.accept(0, 1, 3, GOOD)
    assert ledger.traces(0) == [GOOD, GOOD]
    assert (ledger.num_duplicates, ledger.num_accepted) == (1, 2)


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        (Trace.of(Completion([], [], "stop")), "empty"),
        (Trace.of(Completion([1], [-0.1, -0.2], "stop")), "1 token ids and 2 log-probabilities"),
        (Trace.of(Completion([1] * 4, [-0.1] * 4, "length")), "4 tokens where 3 were asked for"),
        (Trace.of(Completion([1], [math.nan], "stop")), "not finite"),
        (Trace.of(Completion([1], [-math.inf], "stop")), "not finite"),
        (Trace.of(Completion([10], [-0.1], "stop")), "outside the vocabulary"),
        (Trace.of(Completion([-1], [-0.1], "stop")), "outside the vocabulary"),
        (Trace.of(Completion([1], [-0.1], "abort")), "abort"),  # type: ignore[arg-type]
        (Trace([]), "the trace is empty"),
        (Trace([*GOOD.turns, Turn([3], [], [], "stop")]), "the completion is empty"),
        (Trace([*GOOD.turns, Turn([3], [4, 5], [-0.1, -0.2], "stop")]), "4 tokens where 3 were asked for"),
        (Trace([*GOOD.turns, Turn([10], [4], [-0.1], "stop")]), "outside the vocabulary"),
        (Trace([*GOOD.turns, Turn([3], [4], [math.nan], "stop")]), "not finite"),
    ],
)
def test_a_malformed_rollout_is_refused_with_the_reason(trace, reason):
    ledger = make_ledger()
    verdict, said = ledger.accept(0, 0, 3, trace)
    assert verdict is Verdict.MALFORMED
    assert reason in said
    assert (ledger.num_malformed, ledger.num_refused, ledger.num_accepted) == (1, 1, 0)


@pytest.mark.parametrize(("position", "index"), [(2, 0), (-1, 0), (0, 2), (0, -1)])
def test_a_rollout_nobody_asked_for_is_refused(position, index):
    assert make_ledger().accept(position, index, 3, GOOD)[0] is Verdict.MALFORMED


def test_a_replaced_problem_is_expected_anew():
    ledger = make_ledger()
    ledger.accept(0, 0, 3, GOOD)
    ledger.accept(1, 0, 3, GOOD)
    ledger.forget(0)
    assert (ledger.missing(0), ledger.missing(1), ledger.num_accepted) == ([0, 1], [1], 1)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from([2, 3, 3]), st.booleans())))
def test_whatever_arrives_each_rollout_is_in_at_most_once(offers):
    ledger = make_ledger(num_groups=3, group_size=4)
    valid = set()
    for position, index, version, is_good in offers:
        ledger.accept(position, index, version, GOOD if is_good else Trace.of(Completion([], [], "stop")))
        if version == 3 and is_good:
            valid.add((position, index))
    assert ledger.num_accepted == len(valid)
    assert ledger.num_accepted + ledger.num_duplicates + ledger.num_refused == len(offers)
    assert {(p, i) for p in range(3) for i in range(4)} - valid == {(p, i) for p in range(3) for i in ledger.missing(p)}


def test_given_tokens_do_not_count_as_tokens_that_were_asked_for():
    ledger = make_ledger()
    trace = Trace([*GOOD.turns, Turn([3] * 20, [4], [-0.1], "stop")])
    assert ledger.accept(0, 0, 3, trace)[0] is Verdict.ACCEPTED
