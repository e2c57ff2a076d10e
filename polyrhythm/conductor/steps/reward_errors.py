"""The rewards that failed in a step: each kind of error once, with a count."""

from dataclasses import dataclass, field

from polyrhythm.rewards.sandbox.frames import RewardResult


@dataclass
class _Kind:
    first: RewardResult
    problem: int
    count: int = 0


@dataclass
class RewardErrors:
    """Errors that were raised by the same line are one kind, whatever values their messages hold."""

    kinds: dict[str, _Kind] = field(default_factory=dict)

    def add(self, problem: int, result: RewardResult) -> None:
        """Count a reward of this problem that failed."""
        origin = result.origin or str(result.error)
        self.kinds.setdefault(origin, _Kind(result, problem)).count += 1

    @property
    def example(self) -> str:
        return str(next(iter(self.kinds.values())).first.error)

    def report(self, step: int) -> list[str]:
        """One text for the log per kind of error, with the traceback of its first case."""
        texts = []
        for kind in self.kinds.values():
            failed = "1 reward failed" if kind.count == 1 else f"{kind.count} rewards failed"
            text = f"{failed} in step {step}, first for problem {kind.problem}: {kind.first.error}"
            texts.append(f"{text}\n{kind.first.traceback}" if kind.first.traceback else text)
        return texts
