"""What the rewards of a step left behind besides numbers: errors, each kind once with a count, and what functions logged."""

from dataclasses import dataclass, field
from typing import Any

from polyrhythm.rewards.sandbox.frames import GroupScores, RewardFailure

MAX_METRICS = 100


@dataclass
class _Kind:
    first: RewardFailure
    problem: int
    count: int = 0


@dataclass
class RewardRecord:
    """Errors that were raised by the same line are one kind, whatever values their messages hold."""

    kinds: dict[str, _Kind] = field(default_factory=dict)
    extra: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    """By position: the columns of `log_extra`."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """The numbers of `log_metric`."""
    dropped: set[str] = field(default_factory=set)
    """Some of the metrics that were too many."""

    def add(self, position: int, problem: int, scores: GroupScores) -> None:
        """Take note of the scores of a group."""
        for failure in scores.failures.values():
            self._kind_of(problem, failure).count += 1
        for failure in scores.repeated:
            self._kind_of(problem, failure)
        if scores.extra:
            self.extra[position] = scores.extra
        for name, numbers in scores.metrics.items():
            if name in self.metrics or len(self.metrics) < MAX_METRICS:
                self.metrics.setdefault(name, []).extend(numbers)
            elif len(self.dropped) < 3:
                self.dropped.add(name)

    @property
    def example(self) -> str:
        return next(kind.first.error for kind in self.kinds.values() if kind.count)

    def report(self, step: int) -> list[str]:
        """One text for the log per kind of error, with the traceback of its first case."""
        texts = []
        for kind in self.kinds.values():
            text = f"{_what_failed(kind.count)} in step {step}, first for problem {kind.problem}: {kind.first.error}"
            texts.append(f"{text}\n{kind.first.traceback}" if kind.first.traceback else text)
        if self.dropped:
            named = ", ".join(sorted(self.dropped))
            texts.append(f"rewards log more than {MAX_METRICS} metrics in step {step}: {named} and others are left out")
        return texts

    def _kind_of(self, problem: int, failure: RewardFailure) -> _Kind:
        return self.kinds.setdefault(failure.origin or failure.error, _Kind(failure, problem))


def _what_failed(count: int) -> str:
    if count == 0:
        return "a reward failed for several completions together, not for each alone,"
    return "1 reward failed" if count == 1 else f"{count} rewards failed"
