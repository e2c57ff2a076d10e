"""PPO's objective: the probability ratio, clipped where that makes the objective smaller, and the KL divergence if asked for."""

import torch

from polyrhythm.algorithms.kl import KL_LOSSES
from polyrhythm.algorithms.loss import LossInputs, LossOutputs
from polyrhythm.config import AlgorithmConfig


def clipped(inputs: LossInputs, config: AlgorithmConfig) -> LossOutputs:
    policy_N, reference_N, advantages_N = inputs.policy_logprobs_N, inputs.reference_logprobs_N, inputs.advantages_N
    low, high = 1 - config.clip_low, 1 + config.clip_high
    ratio_N = torch.exp(policy_N - inputs.old_logprobs_N)
    losses_N = -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    if reference_N is not None and config.kl_estimator in KL_LOSSES:
        losses_N = losses_N + config.kl_coef * KL_LOSSES[config.kl_estimator](policy_N, reference_N)
    num_clipped = ((ratio_N < low) | (ratio_N > high)).sum()
    return LossOutputs((losses_N * inputs.weights_N).sum(), {"train/clip_fraction": num_clipped})
