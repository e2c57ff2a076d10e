"""Advantages of a group: how much better than its siblings each rollout did."""

from collections.abc import Sequence

import numpy as np

STD_EPSILON = 1e-4


def group_mean(rewards_G: Sequence[float]) -> list[float]:
    """Reward minus the group's mean (Dr. GRPO)."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.size < 2 or np.all(rewards == rewards[0]):
        return [0.0] * rewards.size  # exactly zero, so that such a group can be skipped
    return (rewards - rewards.mean()).tolist()


def group_std(rewards_G: Sequence[float]) -> list[float]:
    """Reward minus the group's mean, over the sample standard deviation (ddof = 1) plus 1e-4 (GRPO)."""
    centred = np.asarray(group_mean(rewards_G))
    if not centred.any():
        return centred.tolist()
    return (centred / (np.std(centred, ddof=1) + STD_EPSILON)).tolist()


ADVANTAGES = {"group_std": group_std, "group_mean": group_mean}
