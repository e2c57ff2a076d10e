"""Addition from a few solved sums: small enough for a laptop, hard enough that a small model has something to learn."""

import random
from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from polyrhythm.types import Problem


@dataclass(config=ConfigDict(extra="forbid", strict=True), frozen=True, kw_only=True)
class Addition:
    """Sums of two numbers of `digits` digits, after `shots` solved ones; `seed` selects another set of problems.

    Both numbers are below the half of 10**digits, so that prompts have one length and answers have `digits` digits.
    """

    digits: int = Field(2, ge=1, le=9)
    shots: int = Field(4, ge=0, le=16)
    seed: int = Field(0, ge=0)

    num_problems = None
    reward = "polyrhythm.tasks.addition:exact_match"
    stop = ("\n",)
    correct_above = 0.5

    def problem(self, index: int) -> Problem:
        *solved, (left, right) = self._draw_sums(random.Random(f"addition/{self.seed}/{index}"))
        shots = "".join(f"{a} + {b} = {a + b}\n" for a, b in solved)
        # No space at the end: tokenizers that join it to the number after it would never see that in their training.
        return Problem(index=index, prompt=f"{shots}{left} + {right} =", columns={"answer": str(left + right)})

    def _draw_sums(self, rng: random.Random) -> list[tuple[int, int]]:
        """All different, so that no solved sum gives the answer away."""
        smallest = 10 ** (self.digits - 1) if self.digits > 1 else 0
        largest = 10**self.digits // 2 - 1
        sums: dict[tuple[int, int], None] = {}
        while len(sums) <= self.shots:
            sums[rng.randint(smallest, largest), rng.randint(smallest, largest)] = None
        return list(sums)


def exact_match(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for a first line that is the answer and nothing else, otherwise 0."""
    return [
        float(completion.partition("\n")[0].strip() == expected)
        for completion, expected in zip(completions, answer, strict=True)
    ]
