"""Overlong: DAPO's soft punishment of completions that come near the limit (equation 13 of its paper)."""

from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(config=ConfigDict(extra="forbid", strict=True), frozen=True, kw_only=True)
class Overlong:
    """0 up to `max_tokens - cache` tokens, from there evenly down to -1 at `max_tokens`, and -1 beyond."""

    max_tokens: int = Field(ge=1)
    """Where the punishment is full: usually rollout.max_tokens."""
    cache: int = Field(ge=1)
    """How many tokens before that it begins."""

    def __post_init__(self) -> None:
        if self.cache > self.max_tokens:
            raise ValueError(
                f"cache={self.cache} is more than max_tokens={self.max_tokens}: no completion would go free"
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        free = self.max_tokens - self.cache
        return [-min(max(len(ids) - free, 0) / self.cache, 1.0) for ids in completion_ids]
