"""Finished groups become rounds of micro-batches: as many as fit the token budget, in the order in which they came."""

import msgspec

from polyrhythm.algorithms.advantages import ADVANTAGES
from polyrhythm.algorithms.cost import CostModel
from polyrhythm.types import Group, MicroBatch


class ReadyGroups:
    """Groups that wait for their pass. Each is priced once when it comes, and compared with its siblings when it goes."""

    def __init__(self, cost: CostModel, tokens_per_micro_batch: int, advantage: str, num_shards: int = 1):
        self._cost = cost
        self._budget = tokens_per_micro_batch
        self._num_shards = num_shards
        self._advantage = ADVANTAGES[advantage]
        self._groups: list[Group] = []
        self._costs: list[int] = []

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def is_full(self) -> bool:
        """Whether there is more than one round holds, so that nothing that still comes can change the next one."""
        return len(self._places()) < len(self._costs)

    def add(self, group: Group) -> None:
        self._groups.append(group)
        self._costs.append(self._cost(group))

    def take(self, version: int) -> list[MicroBatch]:
        """A micro-batch for each shard; some may be empty."""
        places = self._places()
        groups = [_without_excluded(group) for group in self._groups[: len(places)]]
        del self._groups[: len(places)], self._costs[: len(places)]
        parts = [[g for g, at in zip(groups, places, strict=True) if at == shard] for shard in range(self._num_shards)]
        return [self._micro_batch(version, part) for part in parts]

    def _places(self) -> list[int]:
        """The shards that get the first groups: each goes to the one with least to do, until one fits nowhere."""
        totals = [0] * self._num_shards
        is_empty = [True] * self._num_shards
        places: list[int] = []
        for cost in self._costs:
            shard = min(range(self._num_shards), key=totals.__getitem__)
            if not is_empty[shard] and totals[shard] + cost > self._budget:
                break
            places.append(shard)
            totals[shard] += cost
            is_empty[shard] = False
        return places

    def _micro_batch(self, version: int, groups: list[Group]) -> MicroBatch:
        rewards = [[rollout.reward or 0.0 for rollout in group.rollouts] for group in groups]
        return MicroBatch(version=version, groups=groups, advantages=[self._advantage(row) for row in rewards])


def _without_excluded(group: Group) -> Group:
    """A rollout whose reward failed takes no part: neither in the loss nor in the group's mean."""
    if all(rollout.reward is not None for rollout in group.rollouts):
        return group
    return msgspec.structs.replace(group, rollouts=[r for r in group.rollouts if r.reward is not None])
