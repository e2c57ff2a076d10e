"""How functions are called and what their results become, in this process; `test_reward_pool` has the workers."""

from typing import Any

import pytest

from polyrhythm.config import RewardConfig
from polyrhythm.errors import UserError
from polyrhythm.rewards.checks import check_columns
from polyrhythm.rewards.functions import choose_rewards, make_function, short_names
from polyrhythm.rewards.sandbox.calling import Function
from polyrhythm.rewards.sandbox.frames import (
    GroupScores,
    GroupToScore,
    RewardFunction,
    RewardSignature,
    ScoreRequest,
    TrainingState,
)
from polyrhythm.rewards.sandbox.scoring import Scorer
from polyrhythm.types import Problem
from tests.unit.rewards import reward_samples

SAMPLES = reward_samples.__name__


def group_of(*texts: str, prompt: Any = "2+2=", **columns) -> GroupToScore:
    return GroupToScore(
        columns,
        prompt,
        list(texts),
        [[52, index] for index in range(len(texts))],
        ["stop", *["length"] * 9][: len(texts)],
    )


def score_with(
    functions: dict[str, float], *groups: GroupToScore, state: TrainingState | None = None
) -> list[GroupScores]:
    rewards = [RewardFunction(f"{SAMPLES}:{name}", name, weight) for name, weight in functions.items()]
    scorer = Scorer([Function(reward, make_function(reward)) for reward in rewards])
    return scorer.score(ScoreRequest(list(groups), state or TrainingState())).groups


def score(name: str, *texts: str, **columns) -> GroupScores:
    return score_with({name: 1.0}, group_of(*texts, **columns))[0]


@pytest.mark.parametrize(
    ("name", "columns", "rewards"),
    [
        ("as_an_array", {}, [1.0, 4.0]),
        ("as_scalars", {}, [1.0, 4.0]),
        ("asynchronous", {}, [52.0, 53.0]),
        ("everything", {"a": 1, "b": 2}, [9.0, 9.0]),
        ("exact", {"answer": "4", "not_asked_for": 1}, [1.0, 0.0]),
        ("exact", {"answer": "four"}, [0.0, 1.0]),
        ("halved", {}, [0.5, 2.0]),
        ("how_many", {}, [2.0, 2.0]),
        ("judge", {}, [4.0, 4.0]),
        ("own_event_loop", {}, [1.0, 4.0]),
        ("prints", {}, [1.0, 1.0]),
        ("reasons", {}, [0.0, 1.0]),
        ("true_or_false", {}, [1.0, 0.0]),
        ("with_an_alarm", {}, [1.0, 1.0]),
    ],
)
def test_a_function_gets_a_whole_group_under_the_names_that_it_asks_for(name, columns, rewards):
    scores = score(name, "4", "four", **columns)
    assert scores == GroupScores(rewards, {name: rewards})


def test_a_completion_of_messages_is_a_message():
    (scores,) = score_with({"of_messages": 1.0}, group_of("four", "4", prompt=[{"role": "user", "content": "2+2="}]))
    assert scores.rewards == [4.0, 1.0]


def test_a_function_is_told_how_far_the_run_is():
    (scores,) = score_with({"state": 1.0}, group_of("4"), state=TrainingState(global_step=3, max_steps=7, epoch=0.5))
    assert scores.rewards == [3 + 70 + 500]


def test_async_functions_of_a_group_run_together_and_in_the_loop_of_the_last_call():
    reward_samples.meeting.clear()
    (scores,) = score_with({"waits_for_the_other": 1.0, "wakes_the_other": 1.0}, group_of("4"))
    assert scores.rewards == [3.0]
    reward_samples.loops.clear()
    function = RewardFunction(f"{SAMPLES}:same_loop", "same_loop")
    scorer = Scorer([Function(function, make_function(function))])
    for _ in range(2):
        assert scorer.score(ScoreRequest([group_of("4")])).groups[0].rewards == [1.0]


def test_the_reward_is_the_weighted_sum_of_the_functions_that_apply():
    (scores,) = score_with({"only_short_ones": 2.0, "only_long_ones": -0.5}, group_of("4", "four", "two"))
    assert scores.rewards == [2.0, -0.5, None]
    assert scores.scores == {"only_short_ones": [1.0, None, None], "only_long_ones": [None, 1.0, None]}
    assert not scores.failures, "that no function applies is no error"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (
            "bare_number",
            "bare_number must return a list with a number, or None, for each of 2 completions; it returned 1",
        ),
        ("exact", "missing 1 required positional argument: 'answer'"),
        ("logs_for_too_few", "log_extra('parsed', ...) wants a list of one value for each of the 2 completions"),
        ("no_score", "no_score returned a dict without the key 'score': {'acc': 1}"),
        ("not_finite", "not_finite returned nan, which is not a finite number"),
        ("raises", "KeyError: 'no such answer'"),
        ("text", "text returned '1.0', which is not a finite number"),
        (
            "too_many",
            "too_many must return a list with a number, or None, for each of 2 completions; it returned 3 values",
        ),
    ],
)
def test_what_a_function_does_wrong_is_said(name, error):
    scores = score(name, "4", "5")
    assert scores.rewards == [None, None]
    assert all(error in failure.error for failure in scores.failures.values()) and len(scores.failures) == 2


def test_a_completion_that_a_function_cannot_stand_fails_alone():
    scores = score("picky", "good", "bad", "better")
    assert scores.rewards == [4.0, None, 6.0]
    assert list(scores.failures) == [1] and "a bad one" in scores.failures[1].error


def test_a_call_that_fails_for_several_and_for_none_alone_is_told():
    scores = score("together", "a", "b")
    assert scores.rewards == [1.0, 1.0] and not scores.failures
    assert "not together" in scores.repeated[0].error


def test_a_function_that_compares_completions_is_never_called_with_less_than_a_group():
    scores = score_with({"best_of_all": 1.0}, group_of("good", "bad", "better"))[0]
    assert scores.rewards == [None] * 3 and len(scores.failures) == 3 and not scores.repeated
    assert score("best_of_all", "good", "better").rewards == [0.0, 1.0]


def test_one_function_that_fails_excludes_the_rollout_and_keeps_what_the_others_said():
    (scores,) = score_with({"exact": 1.0, "picky": 0.0}, group_of("4", "bad", answer="4"))
    assert scores.rewards == [1.0, None]
    assert scores.scores == {"exact": [1.0, 0.0], "picky": [1.0, None]}


def test_what_a_function_logs_goes_into_columns_and_metrics():
    scores = score("logs", "four", "4", "vier")
    assert scores.extra == {"parsed": ["FOUR", "4", "VIER"], "odd": ["<class 'object'>", None, 2.5]}
    assert scores.metrics == {"length": [4.0, 7.0]}, "what is not finite is left out"


def test_functions_want_one_group_or_several():
    groups = [group_of("a", "b"), group_of("c"), group_of("bad")]
    scores = score_with({"how_many": 1.0, "how_many_at_once": 100.0, "picky": 0.0}, *groups)
    assert [group.rewards for group in scores] == [[402.0, 402.0], [401.0], [None]]


def test_groups_of_one_call_may_have_different_columns():
    scores = score_with({"exact": 1.0}, group_of("4", answer="4"), group_of("4", answer="5", unit="m"))
    assert [group.rewards for group in scores] == [[1.0], [0.0]]


@pytest.mark.parametrize(
    "columns",
    [{"answer": "4"}, {"ground_truth": "4", "answer": "5"}, {"reward_model": {"style": "rule", "ground_truth": "4"}}],
)
@pytest.mark.parametrize("name", ["compute_score", "gsm8k", "later"])
def test_verls_functions_get_one_completion_at_a_time(name, columns):
    scores = score(name, "4", "5", "bad", data_source="gsm8k", ability="math", **columns)
    assert scores.rewards == [1.0, 0.0, None if name == "compute_score" else 0.0]


def test_the_other_keys_of_a_dict_are_columns_and_metrics():
    scores = score("compute_score", "4", "5", data_source="gsm8k", answer="4")
    assert scores.extra == {"acc": [True, False], "pred": ["4", "5"]}
    assert scores.metrics == {"acc": [1.0, 0.0]}


def test_a_key_of_a_dict_may_be_any_text():
    scores = score("with_a_sentence_as_key", "4")
    assert scores.rewards == [1.0] and scores.extra == {"is_it_right_": [True]}


def test_the_ground_truth_of_verl_is_looked_for_where_problems_have_it():
    signature = RewardSignature("m:compute_score", ["ground_truth"], per_completion=True)
    check_columns([signature], Problem(0, "", {"answer": 4}))
    check_columns([signature], Problem(0, "", {"reward_model": {"ground_truth": "4"}}))
    with pytest.raises(UserError, match="needs the column 'ground_truth', and problem 0 has only hint"):
        check_columns([signature], Problem(0, "", {"hint": 4}))


def test_a_function_with_options_is_made_by_its_factory():
    config = RewardConfig(functions=[f"{SAMPLES}:with_bonus"], options={"with_bonus": {"bonus": 0.5, "scale": 2.0}})
    (reward,) = choose_rewards(config, None)
    assert make_function(reward)(["abc"]) == [6.5]


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("judge", {"judge": {}}, "raised TypeError"),
        ("process_id", {"process_id": {"completions": ["a"]}}, "which is no function"),
        ("with_bonus", {"bonus": {}}, "reward.options has 'bonus', which is none of the functions: with_bonus"),
        ("with_bonus", {"with_bonus": {"bnous": 1}}, "unexpected keyword argument 'bnous'"),
    ],
)
def test_options_that_do_not_fit_are_the_users_error(function, options, message):
    with pytest.raises(UserError) as error:
        make_function(choose_rewards(RewardConfig(functions=[f"{SAMPLES}:{function}"], options=options), None)[0])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["a:score"], ["score"]),
        (["a:score", "b.c:score", "b:other"], ["a.score", "c.score", "other"]),
        (["a:score", "x/a.py:score"], ["a.score", "a.score_2"]),
        (["math", "/x/my_rewards.py:length"], ["math", "length"]),
    ],
)
def test_functions_have_short_names_that_differ(specs, names):
    assert short_names(specs) == names
