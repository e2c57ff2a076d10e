"""Repetition: a punishment for saying the same again."""

from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(config=ConfigDict(extra="forbid", strict=True), frozen=True, kw_only=True)
class Repetition:
    """`max_penalty` times the share of runs of `ngram_size` tokens that occurred before; 0 for shorter completions."""

    ngram_size: int = Field(3, ge=1)
    """How many tokens in a row count as one."""
    max_penalty: float = Field(-1.0, le=0)
    """What a completion that does nothing but repeat itself comes near to."""

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [self._penalty(ids) for ids in completion_ids]

    def _penalty(self, ids: Sequence[int]) -> float:
        num_ngrams = len(ids) - self.ngram_size + 1
        if num_ngrams < 1:
            return 0.0
        distinct = {tuple(ids[start : start + self.ngram_size]) for start in range(num_ngrams)}
        return (1 - len(distinct) / num_ngrams) * self.max_penalty
