import numpy as np
import pytest
import torch

from polyrhythm.engine.embedded.sampler import Draws, Sampler


def draw(logits: torch.Tensor, num_draws: int, *, first_seed=0, temperature=1.0, top_p=1.0, top_k=0, position=0):
    draws = Draws(
        rows=np.zeros(num_draws, np.int64),
        seeds=np.arange(first_seed, first_seed + num_draws, dtype=np.uint64),
        positions=np.full(num_draws, position, np.uint64),
        temperature_R=np.array([temperature], np.float32),
        top_p_R=np.array([top_p], np.float32),
        top_k_R=np.array([top_k], np.int64),
    )
    return Sampler(logits.shape[1]).draw(logits.clone(), draws)


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> tuple[float, float]:
    """The statistic over all tokens expected at least 5 times, the others as one cell, and its 1e-5 quantile."""
    counts = np.bincount(tokens, minlength=len(probabilities)).astype(float)
    expected = probabilities * len(tokens)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    return float(((observed - expected) ** 2 / expected).sum()), freedom + 4.3 * (2 * freedom) ** 0.5 + 13


@pytest.mark.parametrize("vocab_size", [20, 256, 700])
@pytest.mark.parametrize("position", [0, 17])
def test_tokens_are_drawn_with_the_probabilities_of_the_softmax(vocab_size, position):
    torch.manual_seed(vocab_size)
    logits = torch.randn(1, vocab_size) * 2
    tokens, _ = draw(logits, 40_000, position=position)
    statistic, limit = chi_square(tokens, logits.double().softmax(-1)[0].numpy())
    assert statistic < limit


def test_consecutive_positions_are_drawn_independently():
    logits = torch.zeros(1, 10)
    first, second = (draw(logits, 20_000, position=position)[0] for position in (3, 4))
    statistic, limit = chi_square(first * 10 + second, np.full(100, 0.01))
    assert statistic < limit


def test_temperature_sharpens_the_distribution_and_its_log_probabilities():
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = draw(logits, 20_000, temperature=0.5)
    tempered = (logits.double() / 0.5).log_softmax(-1)[0].numpy()
    assert np.abs(logprobs - tempered[tokens]).max() < 1e-6
    statistic, limit = chi_square(tokens, np.exp(tempered))
    assert statistic < limit


def test_top_k_keeps_the_most_likely_tokens_and_reports_unfiltered_log_probabilities():
    logits = torch.randn(1, 600, generator=torch.Generator().manual_seed(2))
    tokens, logprobs = draw(logits, 5_000, top_k=7)
    assert set(tokens) == set(logits[0].topk(7).indices.tolist())
    assert np.abs(logprobs - logits.double().log_softmax(-1)[0].numpy()[tokens]).max() < 1e-6


def test_top_p_keeps_the_smallest_set_that_reaches_the_probability():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert set(draw(logits, 2_000, top_p=0.49)[0]) == {0}
    assert set(draw(logits, 2_000, top_p=0.79)[0]) == {0, 1}
    assert set(draw(logits, 2_000, top_p=0.81)[0]) == {0, 1, 2}


def test_top_p_applies_to_what_top_k_has_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the two tokens that top-k leaves, the first has 4/7 of the probability.
    assert set(draw(logits, 2_000, top_k=2, top_p=0.55)[0]) == {0}
    assert set(draw(logits, 2_000, top_k=2, top_p=0.6)[0]) == {0, 1}


def test_a_draw_depends_on_its_own_row_and_key_only():
    torch.manual_seed(3)
    logits = torch.randn(5, 700)
    everything = Draws(
        rows=np.array([4, 0, 2, 2]),
        seeds=np.array([7, 8, 9, 10], np.uint64),
        positions=np.array([1, 2, 3, 3], np.uint64),
        temperature_R=np.array([1.0, 1.0, 0.7, 1.0, 1.3], np.float32),
        top_p_R=np.array([1.0, 0.9, 1.0, 1.0, 1.0], np.float32),
        top_k_R=np.zeros(5, np.int64),
    )
    tokens, logprobs = Sampler(700).draw(logits.clone(), everything)
    alone, alone_logprobs = draw(logits[2:3], 2, first_seed=9, position=3, temperature=0.7)
    assert tokens[2:].tolist() == alone.tolist()
    assert logprobs[2:].tobytes() == alone_logprobs.tobytes()


def test_a_small_change_of_the_logits_changes_few_tokens():
    torch.manual_seed(4)
    logits = torch.randn(1, 700) * 2
    tokens, _ = draw(logits, 5_000)
    nudged, _ = draw(logits + 0.01 * torch.randn(1, 700), 5_000)
    assert (tokens == nudged).mean() > 0.97
