"""Format: the completion has the form that was asked for."""

from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from polyrhythm.rewards.kinds.completions import Completion, Pattern, compile_pattern, text_of

THINK_THEN_ANSWER = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"


@dataclass(config=ConfigDict(extra="forbid", strict=True), frozen=True, kw_only=True)
class Format:
    """1 for a completion that the pattern matches from its beginning to its end, spaces around it left out, otherwise 0."""

    pattern: Pattern = THINK_THEN_ANSWER
    """A regular expression; a dot matches line ends too. The default is <think>…</think><answer>…</answer>, each once."""

    def __call__(self, completions: Sequence[Completion], **_: Any) -> list[float]:
        pattern = compile_pattern(self.pattern)
        return [float(pattern.fullmatch(text_of(completion).strip()) is not None) for completion in completions]
