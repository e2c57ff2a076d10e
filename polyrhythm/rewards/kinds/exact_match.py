"""Exact match: what the completion says is the answer."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from polyrhythm.rewards.kinds.completions import Completion, Pattern, last_match, text_of


@dataclass(config=ConfigDict(extra="forbid", strict=True), frozen=True, kw_only=True)
class ExactMatch:
    """1 if what the completion says is the column `answer`, spaces around either left out, otherwise 0.

    An answer that is a list holds several right ones. Where the answer is None, the reward is None.
    """

    part: Literal["all", "first_line", "last_line"] = "all"
    """What of the completion is compared: all of it or one line."""
    pattern: Pattern = ""
    """A regular expression; what its last match in that part says is compared: the first group, or all of it without groups."""
    ignore_case: bool = False
    """Whether capital and small letters are the same."""

    def __call__(self, completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float | None]:
        return [
            None if right is None else float(self._is_right(text_of(completion), right))
            for completion, right in zip(completions, answer, strict=True)
        ]

    def _is_right(self, text: str, right: Any) -> bool:
        said: str | None = _part_of(text, self.part)
        if self.pattern:
            said = last_match(self.pattern, said)
        if said is None:
            return False
        rights = right if isinstance(right, list | tuple) else [right]
        return self._compared(said) in {self._compared(text) for one in rights for text in _texts_of(one)}

    def _compared(self, text: str) -> str:
        text = text.strip()
        return text.casefold() if self.ignore_case else text


def _texts_of(right: Any) -> list[str]:
    """How an answer may be written: a table makes 4.0 of every 4 in a column that has an empty cell."""
    is_whole = isinstance(right, float) and right.is_integer()
    return [str(right), str(int(right))] if is_whole else [str(right)]


def _part_of(text: str, part: str) -> str:
    if part == "first_line":
        return text.partition("\n")[0]
    if part == "last_line":
        return text.rstrip().rpartition("\n")[2]
    return text
