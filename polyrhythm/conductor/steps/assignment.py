"""Which rank of the trainer gets which group of a step: each group goes to exactly one."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

from polyrhythm.algorithms.cost import CostModel, num_fitting
from polyrhythm.config import Config
from polyrhythm.types import Group

MAX_TOKENS_PER_REPLY = 1_000_000

Rank = int | str
"""Ranks that come and go are known by name, a fixed number of them by their index."""


class GroupAssignment:
    """Deals the groups of one step, in hand-out order, to the ranks that ask for them.

    By demand a rank that asks gets its part of what is there, but no more than about one micro-batch, because it could not
    be taken back: so a fast rank gets more groups than a slow one. In turn, group i goes to rank i modulo their number
    whenever it comes, so that a run repeats bit for bit.

    A rank owns what it was dealt until it is lost: what it owned and no update has settled is dealt again, before the rest.
    """

    def __init__(
        self, ranks: Sequence[Rank], tokens_per_share: float, cost: Callable[[Group], int], *, in_turn: bool
    ):  # fmt: skip
        self._ranks = list(ranks)
        self._tokens_per_share = tokens_per_share
        self._cost = cost
        self._in_turn = in_turn
        self._dealt: dict[Rank, list[Group]] = {rank: [] for rank in ranks}
        self._num_dealt = 0
        self._turn = 0
        self._returned: list[Group] = []
        self._num_sent: Counter[Rank] = Counter()
        self._num_settled: Counter[Rank] = Counter()
        self._num_settled_by_lost = 0
        self.num_returned = 0
        """Groups that a lost rank had received and that are dealt again."""

    @classmethod
    def of(cls, config: Config) -> "GroupAssignment":
        training = config.training
        # Only the trainer knows whether its model can share prompts; a share of about one micro-batch need not.
        cost = CostModel.of(config, share_prompt=training.share_prompt != "never")
        ranks = [] if training.elastic else range(training.num_replicas)
        tokens_per_round = training.tokens_per_micro_batch * (training.num_ranks // training.num_replicas)
        tokens_per_share = math.inf if len(ranks) == 1 else tokens_per_round
        return cls(ranks, tokens_per_share, cost, in_turn=config.order == "problem")

    @property
    def num_taken(self) -> int:
        """Groups that have reached a rank and were not lost with it."""
        return self._num_sent.total() + self._num_settled_by_lost

    def add(self, rank: Rank) -> None:
        """From now on it may be given groups."""
        if rank not in self._ranks:
            self._ranks.append(rank)
            self._dealt[rank] = []

    def lose(self, rank: Rank) -> list[int]:
        """It is gone: the positions of what it owned, which are dealt again."""
        if rank not in self._ranks:
            return []
        self._ranks.remove(rank)
        owned = self._dealt.pop(rank)[self._num_settled[rank] :]
        self.num_returned += self._num_sent.pop(rank, 0) - self._num_settled[rank]
        self._num_settled_by_lost += self._num_settled.pop(rank, 0)
        self._returned = owned + self._returned
        return [group.position for group in owned]

    def owned(self, rank: Rank) -> list[int]:
        """The positions of what it was dealt since the last update was settled."""
        return [group.position for group in self._dealt[rank][self._num_settled[rank] :]]

    @property
    def num_waiting(self) -> int:
        """Groups of lost ranks that have no new owner yet."""
        return len(self._returned)

    def has_dealt_all(self, until: int) -> bool:
        """Whether each of the first `until` groups has an owner."""
        return self._num_dealt >= until and not self._returned

    def settle(self) -> None:
        """What was dealt so far is in an update: nobody can lose it any more."""
        self._num_settled = Counter({rank: len(dealt) for rank, dealt in self._dealt.items()})

    def share(self, ready: list[Group], rank: Rank, offset: int, until: int) -> tuple[list[Group], bool]:
        """What `rank` gets after its first `offset` groups, and whether nothing of the step's first `until` is left for it.

        `ready` are the step's groups that may be handed out. Asking again for the same offset is harmless.
        """
        mine = self._dealt[rank]
        waiting = self._returned + ready[self._num_dealt : until]
        if self._in_turn:
            for group in waiting:
                self._give(self._ranks[self._turn % len(self._ranks)], [group])
                self._turn += 1
        elif offset >= len(mine):
            fair = waiting[: math.ceil(len(waiting) / len(self._ranks))]
            self._give(rank, fair[: num_fitting([self._cost(group) for group in fair], self._tokens_per_share)])
        asked = mine[offset:]
        groups = asked[: num_fitting([_num_sent(group) for group in asked], MAX_TOKENS_PER_REPLY)]
        self._num_sent[rank] = max(self._num_sent[rank], min(offset, len(mine)) + len(groups))
        return groups, self.has_dealt_all(until) and offset + len(groups) >= len(mine)

    def _give(self, rank: Rank, groups: list[Group]) -> None:
        """These are the next ones that wait."""
        self._dealt[rank] += groups
        num_again = min(len(groups), len(self._returned))
        del self._returned[:num_again]
        self._num_dealt += len(groups) - num_again


def _num_sent(group: Group) -> int:
    """Tokens of a reply: unlike the cost of a pass, also of groups and rollouts that are not trained on."""
    return len(group.prompt_ids) + sum(rollout.trace.num_tokens for rollout in group.rollouts)
