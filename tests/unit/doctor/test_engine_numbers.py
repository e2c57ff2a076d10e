"""What an engine computes, found by asking it: raw or processed log-probabilities, and whose."""

import math
import random

import pytest

from polyrhythm.doctor.engine_numbers import NUM_DRAWS, PROMPT, TEMPERATURE, Drawn, check_logprob_mode, check_weights
from polyrhythm.training.policy.tri_model import load_policy
from polyrhythm.weights.proof import own_logprobs
from tests.tiny_model import save_tiny_model

LOGITS = [2.0, 1.0, 0.5, 0.0]


def engine_that(*, is_processed: bool, logits: list[float] = LOGITS):
    """Draws one token as asked, and says its log-probability in one of two ways."""

    def ask(temperature: float, num: int, max_tokens: int) -> list[Drawn]:
        draw = random.Random(7)
        drawn = draw.choices(range(len(logits)), [math.exp(logit / temperature) for logit in logits], k=num)
        told = [logit / (temperature if is_processed else 1.0) for logit in logits]
        total = math.log(sum(map(math.exp, told)))
        return [Drawn([token], [told[token] - total]) for token in drawn]

    return ask


def test_processed_log_probabilities_follow_the_temperature():
    (finding,) = check_logprob_mode(engine_that(is_processed=True))
    assert finding.state == "ok" and "processed" in finding.text
    assert finding.numbers["ratio"] == pytest.approx(1 / TEMPERATURE)


def test_raw_log_probabilities_are_a_problem_with_its_fix():
    (finding,) = check_logprob_mode(engine_that(is_processed=False))
    assert finding.state == "problem" and "raw" in finding.text and "processed_logprobs" in finding.fix


def test_an_engine_that_draws_nothing_twice_is_not_judged():
    flat = [0.0] * (NUM_DRAWS * 1000)
    (finding,) = check_logprob_mode(engine_that(is_processed=True, logits=flat))
    assert finding.state == "warning" and "cannot be told" in finding.text


@pytest.mark.parametrize(("error", "state"), [(0.0, "ok"), (0.05, "warning"), (7.0, "problem")])
def test_weights_are_those_of_a_model_if_the_log_probabilities_are(tmp_path, error, state):
    model_dir = save_tiny_model(tmp_path / "model")
    drawn = [5, 6, 7]
    logprobs = own_logprobs(load_policy(model_dir), [[*PROMPT, *drawn]])[-3:]
    logprobs[1] -= error
    (finding,) = check_weights(lambda *_: [Drawn(drawn, logprobs)], model_dir)
    assert finding.state == state and "over 3 tokens" in finding.text
