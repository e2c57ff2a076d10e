"""What a group costs the trainer: one definition for whoever cuts groups into micro-batches, hands them to ranks or packs them.

The unit is a token of a packed row, of the prompt or of a completion. A micro-batch that fits the budget here is one row there,
and so one forward and backward pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polyrhythm.config import Config
from polyrhythm.types import Group


def tokens_in_row(length: int) -> int:
    """Of a completion of this length: its last token is predicted and never read, so it is not in the row."""
    return length - 1


def block_tokens(num_prompt_tokens: int, lengths: Iterable[int]) -> int:
    """Of one copy of a prompt and the completions of these lengths that share it."""
    return num_prompt_tokens + sum(map(tokens_in_row, lengths))


def num_fitting(costs: Sequence[int], budget: float) -> int:
    """How many of the first costs stay within the budget together; at least one."""
    total = 0
    for index, cost in enumerate(costs):
        total += cost
        if index and total > budget:
            return index
    return len(costs)


@dataclass(frozen=True)
class CostModel:
    """Asks of a group what its forward pass takes."""

    share_prompt: bool
    """Whether a prompt is computed once for all its completions: the model decides that, not the configuration."""
    has_kl: bool
    """With a KL term every group is scored; without, one whose rewards are all equal has no gradient and is skipped."""

    @classmethod
    def of(cls, config: Config, *, share_prompt: bool) -> "CostModel":
        return cls(share_prompt=share_prompt, has_kl=config.algorithm.kl_coef > 0)

    def __call__(self, group: Group) -> int:
        """Tokens in the row; 0 where there is no pass. A rollout whose reward failed takes no part."""
        scored = [rollout for rollout in group.rollouts if rollout.reward is not None]
        if not scored or not (self.has_kl or len({rollout.reward for rollout in scored}) > 1):
            return 0
        lengths = [rollout.trace.num_tokens for rollout in scored]
        if self.share_prompt:
            return block_tokens(len(group.prompt_ids), lengths)
        return sum(block_tokens(len(group.prompt_ids), [length]) for length in lengths)
