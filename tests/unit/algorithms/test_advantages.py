import numpy as np
import pytest

from polyrhythm.algorithms.advantages import group_mean, group_std


def test_the_group_mean_is_subtracted():
    assert group_mean([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]


def test_the_spread_is_the_sample_standard_deviation():
    rewards = [1.0, 0.0, 0.0, 0.5]
    expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-4)
    assert group_std(rewards) == pytest.approx(expected.tolist())


@pytest.mark.parametrize("rewards", [[0.1] * 7, [1.0], []])
@pytest.mark.parametrize("advantage", [group_mean, group_std])
def test_rewards_without_variance_give_exactly_zero(advantage, rewards):
    assert advantage(rewards) == [0.0] * len(rewards)
