"""How long the completions of a problem are, as far as is known: the longest go out first and end a step sooner. Pure."""

from collections.abc import Sequence

from polyrhythm.types import Group, Problem


class LengthHistory:
    """The mean completion length of each problem at its last visit."""

    def __init__(self) -> None:
        self._lengths: dict[int, float] = {}
        self._total = 0.0

    def observe(self, group: Group) -> None:
        length = group.num_sampled / len(group.rollouts)
        self._total += length - self._lengths.get(group.problem_index, 0.0)
        self._lengths[group.problem_index] = length

    def dispatch_order(self, problems: Sequence[Problem]) -> list[int]:
        """Positions, longest expected first; a new problem counts as average, and equals keep their order."""
        average = self._total / len(self._lengths) if self._lengths else 0.0
        return sorted(range(len(problems)), key=lambda p: -self._lengths.get(problems[p].index, average))
