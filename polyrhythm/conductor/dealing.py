"""Which rank of the trainer gets which group of a step: each group goes to exactly one."""

from collections import Counter

from polyrhythm.types import Group

MAX_TOKENS_PER_REPLY = 1_000_000


class Dealing:
    """Deals the groups of one step, in hand-out order, to the ranks that ask for them.

    By demand a rank that asks gets its part of what is there, so that a fast rank gets more groups in the end. In turn,
    group i goes to rank i modulo `num_ranks` whenever it comes, so that a run repeats bit for bit.
    """

    def __init__(self, num_ranks: int, *, in_turn: bool):
        self.num_ranks = num_ranks
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
        ready = ready[:until]
        if self._in_turn:
            self._deal_in_turn(ready)
        elif offset >= len(mine):
            self._deal_to(rank, ready)
        groups = _one_reply(mine[offset:])
        self._num_sent[rank] = max(self._num_sent[rank], offset + len(groups))
        return groups, self._num_dealt >= until and offset + len(groups) >= len(mine)

    def _deal_in_turn(self, ready: list[Group]) -> None:
        for index in range(self._num_dealt, len(ready)):
            self._dealt[index % self.num_ranks].append(ready[index])
        self._num_dealt = max(self._num_dealt, len(ready))

    def _deal_to(self, rank: int, ready: list[Group]) -> None:
        waiting = ready[self._num_dealt :]
        part = waiting[: -(-len(waiting) // self.num_ranks)]
        self._dealt[rank] += part
        self._num_dealt += len(part)


def _one_reply(groups: list[Group]) -> list[Group]:
    """The first groups, as many as one reply holds."""
    num_tokens = 0
    for index, group in enumerate(groups):
        num_tokens += group.num_completion_tokens + len(group.prompt_ids)
        if index and num_tokens > MAX_TOKENS_PER_REPLY:
            return groups[:index]
    return groups
