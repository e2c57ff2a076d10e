"""Which rank of the trainer gets which group of a step: each group goes to exactly one."""

import math
from collections import Counter

from polyrhythm.types import Group

MAX_TOKENS_PER_REPLY = 1_000_000


class GroupAssignment:
    """Deals the groups of one step, in hand-out order, to the ranks that ask for them.

    By demand a rank that asks gets its part of what is there, but no more than about one micro-batch, because it could not
    be taken back: so a fast rank gets more groups than a slow one. In turn, group i goes to rank i modulo `num_ranks`
    whenever it comes, so that a run repeats bit for bit.
    """

    def __init__(self, num_ranks: int, tokens_per_micro_batch: int, *, in_turn: bool):
        self.num_ranks = num_ranks
        self._tokens_per_share = tokens_per_micro_batch if num_ranks > 1 else math.inf
        self._in_turn = in_turn
        self._dealt: list[list[Group]] = [[] for _ in range(num_ranks)]
        self._num_dealt = 0
        self._num_sent: Counter[int] = Counter()

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
        groups = _up_to(MAX_TOKENS_PER_REPLY, mine[offset:])
        self._num_sent[rank] = max(self._num_sent[rank], min(offset, len(mine)) + len(groups))
        return groups, self._num_dealt >= until and offset + len(groups) >= len(mine)

    def _deal_in_turn(self, waiting: list[Group]) -> None:
        for group in waiting:
            self._dealt[self._num_dealt % self.num_ranks].append(group)
            self._num_dealt += 1

    def _deal_to(self, rank: int, waiting: list[Group]) -> None:
        part = _up_to(self._tokens_per_share, waiting[: math.ceil(len(waiting) / self.num_ranks)])
        self._dealt[rank] += part
        self._num_dealt += len(part)


def _up_to(max_tokens: float, groups: list[Group]) -> list[Group]:
    """The first groups, as many as have no more tokens together; at least one."""
    num_tokens = 0
    for index, group in enumerate(groups):
        num_tokens += sum(rollout.trace.num_tokens for rollout in group.rollouts) + len(group.prompt_ids)
        if index and num_tokens > max_tokens:
            return groups[:index]
    return groups
