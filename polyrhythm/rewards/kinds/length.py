"""Length: a completion is worth the more, the nearer it comes to a number of tokens."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(config=ConfigDict(extra="forbid", strict=True), frozen=True, kw_only=True)
class Length:
    """1 at `target` tokens, less the further away, 0 from `budget` tokens away on. With target = 0 shorter is better."""

    budget: int = Field(ge=1)
    """How many tokens away from the target the reward is 0."""
    target: int = Field(0, ge=0)
    """The number of tokens that is worth 1."""
    shape: Literal["linear", "cosine"] = "linear"
    """How it falls in between: evenly, or slowly at both ends."""

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [self._worth(len(ids)) for ids in completion_ids]

    def _worth(self, num_tokens: int) -> float:
        away = min(abs(num_tokens - self.target) / self.budget, 1.0)
        return 1.0 - away if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * away))
