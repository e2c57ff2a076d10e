"""What every loss is given, and what it returns. To add one: a function in `losses/`, or `algorithm.loss = "module:name"`.

    def reinforce(inputs: LossInputs, config: AlgorithmConfig) -> LossOutputs:
        losses_N = -inputs.advantages_N * inputs.policy_logprobs_N
        return LossOutputs((losses_N * inputs.weights_N).sum(), {})

A loss is a sum over sequences, never a mean: `forward_backward` adds such sums up in whatever order groups arrive, and the
division by the step's total happens once, in `optim_step`. It must not look at how many sequences it is given at a time.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from polyrhythm.config import AlgorithmConfig


class LossInputs(NamedTuple):
    """The N tokens of one row that the policy sampled, in the order of the row. Given tokens are not among them."""

    policy_logprobs_N: Tensor
    """By the policy that is being trained: these alone carry a gradient."""
    old_logprobs_N: Tensor
    """By the weights that generated the tokens; until the step's first update they are the policy's own, to the bit."""
    reference_logprobs_N: Tensor | None
    """By the reference model; None when `algorithm.kl_coef` is 0."""
    rollout_logprobs_N: Tensor
    """By the engine, from the same weights as the old ones: they differ in rounding only."""
    advantages_N: Tensor
    """That of the token's rollout."""
    weights_N: Tensor
    """What the token counts in `algorithm.aggregation`: multiply its loss by this before adding up."""
    sequence_N: Tensor
    """Which sequence the token belongs to, counted from 0 in the order of the row.

    A rollout is never split over rows, so that a sum over a sequence here is the sum over the whole rollout.
    """


class LossOutputs(NamedTuple):
    """The summed loss, and other sums over the same tokens: the metrics of a step show them divided by its tokens."""

    loss: Tensor
    sums: dict[str, Tensor]
    """By the name of the metric; those of a new loss begin with "loss/"."""


Loss = Callable[[LossInputs, AlgorithmConfig], LossOutputs]
