"""The part of one process in an update, besides its gradients: what it was trained on, and what it has added up for metrics."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor


@dataclass
class Sums:
    """What a step adds up for its metrics; sums and counts, divided only when they are shown."""

    totals: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    of_the_loss: dict[str, float] = field(default_factory=dict)
    """What the loss itself adds up, by the name of the metric that shows it per token."""

    @classmethod
    def of_all(cls, parts: Sequence["Sums"]) -> "Sums":
        merged = cls()
        for sums in parts:
            for name, value in sums.totals.items():
                merged.add(name, value)
            for name, value in sums.maxima.items():
                merged.peak(name, value)
            for name, value in sums.of_the_loss.items():
                merged.add_of_the_loss(name, value)
        return merged

    def add(self, name: str, value: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + value

    def add_of_the_loss(self, name: str, value: float) -> None:
        self.of_the_loss[name] = self.of_the_loss.get(name, 0.0) + value

    def peak(self, name: str, value: float) -> None:
        self.maxima[name] = max(self.maxima.get(name, float("-inf")), value)

    def take(self, totals: dict[str, Tensor], maxima: dict[str, Tensor], of_the_loss: dict[str, Tensor]) -> None:
        """All of them at once: the host waits for an accelerator one time, and then knows that it is done."""
        tensors = [*totals.values(), *maxima.values(), *of_the_loss.values()]
        values = iter(torch.stack([tensor.to(tensors[0].dtype) for tensor in tensors]).tolist())
        for names, note in ((totals, self.add), (maxima, self.peak), (of_the_loss, self.add_of_the_loss)):
            for name in names:
                note(name, next(values))


class Part(msgspec.Struct, frozen=True):
    """Of one update; `wait_s` is how long its process has waited for groups in the step so far."""

    positions: list[int]
    sums: Sums
    wait_s: float
