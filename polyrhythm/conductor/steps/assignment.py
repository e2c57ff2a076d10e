"""Which rank of the trainer gets which group of a step: each group goes to exactly one."""

import math
from collections import Counter
from collections.abc import Callable

from polyrhythm.algorithms.cost import CostModel, num_fitting
from polyrhythm.config import Config
from polyrhythm.types import Group

MAX_TOKENS_PER_REPLY = 1_000_000


class GroupAssignment:
    """Deals the groups of one step, in hand-out order, to the ranks that ask for them.

    By demand a rank that asks gets its part of what is there, but no more than about one micro-batch, because it could not
    be taken back: so a fast rank gets more groups than a slow one. In turn, group i goes to rank i modulo `num_ranks`
    whenever it comes, so that a run repeats bit for bit.
    """

    def __init__(
        self, num_ranks: int, tokens_per_micro_batch: int, cost: Callable[[Group], int], *, in_turn: bool
    ):  # fmt: skip
        self.num_ranks = num_ranks
        self._tokens_per_share = tokens_per_micro_batch if num_ranks > 1 else math.inf
        self._cost = cost
        self._in_turn = in_turn
        self._dealt: list[list[Group]] = [[] for _ in range(num_ranks)]
        self._num_dealt = 0
        self._num_sent: Counter[int] = Counter()

    @classmethod
    def of(cls, config: Config) -> "GroupAssignment":
        training = config.training
        # Only the trainer knows whether its model can share prompts; a share of about one micro-batch need not.
        cost = CostModel.of(config, share_prompt=training.share_prompt != "never")
        return cls(training.num_ranks, training.tokens_per_micro_batch, cost, in_turn=config.order == "problem")

    @property
    def num_taken(self) -> int:
        """Groups that have reached a rank."""
        return self._num_sent.total()

    def share(self, ready: list[Group], rank: int, offset: int, until: int) -> tuple[list[Group], bool]:
        """What `rank` gets after its first `offset` groups, and whether nothing of the step's first `until` is left for it.

        `ready` are the step's groups that may be handed out. Asking again for the same offset is harmless.
        """
        mine = self._dealt[rank]
        waiting = ready[self._num_dealt : until]
        if self._in_turn:
            self._deal_in_turn(waiting)
        elif offset >= len(mine):
            self._deal_to(rank, waiting)
        asked = mine[offset:]
        groups = asked[: num_fitting([_num_sent(group) for group in asked], MAX_TOKENS_PER_REPLY)]
        self._num_sent[rank] = max(self._num_sent[rank], min(offset, len(mine)) + len(groups))
        return groups, self._num_dealt >= until and offset + len(groups) >= len(mine)

    def _deal_in_turn(self, waiting: list[Group]) -> None:
        for group in waiting:
            self._dealt[self._num_dealt % self.num_ranks].append(group)
            self._num_dealt += 1

    def _deal_to(self, rank: int, waiting: list[Group]) -> None:
        fair = waiting[: math.ceil(len(waiting) / self.num_ranks)]
        part = fair[: num_fitting([self._cost(group) for group in fair], self._tokens_per_share)]
        self._dealt[rank] += part
        self._num_dealt += len(part)


def _num_sent(group: Group) -> int:
    """Tokens of a reply: unlike the cost of a pass, also of groups and rollouts that are not trained on."""
    return len(group.prompt_ids) + sum(rollout.trace.num_tokens for rollout in group.rollouts)
