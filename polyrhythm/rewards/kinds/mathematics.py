"""Math: the completion's answer equals the reference, as math-verify compares them (1/2 is 0.5 is \\frac{1}{2})."""

import logging
import re
import threading
from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from polyrhythm.errors import UserError
from polyrhythm.rewards.kinds.completions import Completion, Pattern, last_match, text_of

ANSWER_TAG = r"<answer>(.*?)</answer>"
GSM8K_MARK = "####"
DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
COMMANDS = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}|\\[a-zA-Z]+")
WORD = re.compile(r"[^\W\d_]{3,}")
MAX_CHARS = 20_000
"""An answer is looked for in the last characters only: the time that patterns and math-verify take grows with the text."""


@dataclass(config=ConfigDict(extra="forbid", strict=True), frozen=True, kw_only=True)
class Math:
    """1 if the completion's answer equals the column `answer`, 0 if not, None where `answer` cannot be parsed.

    `answer` may be a number, LaTeX, or a solution whose answer comes after `####` as in gsm8k.
    """

    pattern: Pattern = ANSWER_TAG
    """Where the answer is: the first group of the last match; if nothing matches, anywhere in the completion."""
    after: str = ""
    """Only what comes after the last of these, such as </think>, counts; a completion without it has no answer."""
    latex_only: bool = False
    """Whether an answer must be LaTeX, such as \\boxed{42}, as for TRL's accuracy_reward; otherwise 42 is one too."""
    timeout_s: int = Field(3, ge=1)
    """Parsing or comparing one answer may take so long: one that takes longer is wrong."""

    def __post_init__(self) -> None:
        try:
            import math_verify  # noqa: F401  a missing package is found out now, not at the first reward
        except ImportError as error:
            raise UserError(
                f"reward 'math' needs the package math-verify: pip install 'polyrhythm[math]' ({error})"
            ) from error
        # It would log the whole text of each completion that it gives up on.
        for part in ("parser", "grader"):
            logging.getLogger(f"math_verify.{part}").setLevel(logging.CRITICAL)

    def __call__(self, completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float | None]:
        references = {right: self._parse_reference(right) for right in map(str, answer)}
        return [
            self._score(text_of(completion), references[str(right)])
            for completion, right in zip(completions, answer, strict=True)
        ]

    def _parse_reference(self, right: str) -> list[Any]:
        from math_verify import parse

        return parse(_as_latex(right.rpartition(GSM8K_MARK)[2]), parsing_timeout=self._timeout_s)

    def _score(self, text: str, reference: list[Any]) -> float | None:
        from math_verify import verify

        if not reference:
            return None
        answer = self._parse_answer(self._answer_in(text))
        return float(verify(reference, answer, timeout_seconds=self._timeout_s))

    def _answer_in(self, text: str) -> str:
        if self.after:
            _, found, text = text.rpartition(self.after)
            if not found:
                return ""
        text = text[-MAX_CHARS:]
        marked = last_match(self.pattern, text) if self.pattern else None
        return text if marked is None else _as_latex(marked)

    def _parse_answer(self, text: str) -> list[Any]:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

        if not self.latex_only:
            # What is boxed comes first, then other LaTeX and plain expressions.
            kinds = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
            return parse(text, extraction_config=kinds, parsing_timeout=self._timeout_s)
        kind = LatexExtractionConfig(
            normalization_config=NormalizationConfig(units=True),
            boxed_match_priority=0,
            try_extract_without_anchor=False,
        )
        return parse(text, extraction_config=[kind], extraction_mode="first_match", parsing_timeout=self._timeout_s)

    @property
    def _timeout_s(self) -> Any:
        """math-verify keeps time with an alarm, which the main thread alone can set: a worker calls rewards there."""
        return self.timeout_s if threading.current_thread() is threading.main_thread() else None


def _as_latex(text: str) -> str:
    """An answer by itself as math-verify wants it: without the box it would read 2\\sqrt{3} as 2, and x + 1 not at all."""
    text = text.strip()
    is_prose = WORD.search(COMMANDS.sub("", text)) is not None
    return text if not text or is_prose or DELIMITED.search(text) else f"\\boxed{{{text}}}"
