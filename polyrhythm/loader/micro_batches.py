"""Finished groups become micro-batches: as many as fit the token budget, in the order in which they came."""

import msgspec

from polyrhythm.algorithms.advantages import ADVANTAGES
from polyrhythm.algorithms.cost import CostModel, num_fitting
from polyrhythm.types import Group, MicroBatch


class ReadyGroups:
    """Groups that wait for their pass. Each is priced once when it comes, and compared with its siblings when it goes."""

    def __init__(self, cost: CostModel, tokens_per_micro_batch: int, advantage: str):
        self._cost = cost
        self._budget = tokens_per_micro_batch
        self._advantage = ADVANTAGES[advantage]
        self._groups: list[Group] = []
        self._costs: list[int] = []

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def is_full(self) -> bool:
        """Whether there is more than one micro-batch holds, so that nothing that still comes can change the next one."""
        return num_fitting(self._costs, self._budget) < len(self._costs)

    def add(self, group: Group) -> None:
        self._groups.append(group)
        self._costs.append(self._cost(group))

    def take(self, version: int) -> MicroBatch:
        num = num_fitting(self._costs, self._budget)
        groups = [_without_excluded(group) for group in self._groups[:num]]
        del self._groups[:num], self._costs[:num]
        rewards = [[rollout.reward or 0.0 for rollout in group.rollouts] for group in groups]
        return MicroBatch(version=version, groups=groups, advantages=[self._advantage(row) for row in rewards])


def _without_excluded(group: Group) -> Group:
    """A rollout whose reward failed takes no part: neither in the loss nor in the group's mean."""
    if all(rollout.reward is not None for rollout in group.rollouts):
        return group
    return msgspec.structs.replace(group, rollouts=[r for r in group.rollouts if r.reward is not None])
