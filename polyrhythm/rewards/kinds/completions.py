"""What a completion says, whatever its form, and what patterns find in it."""

import re
from collections import deque
from typing import Annotated, Any

from pydantic import AfterValidator

Completion = str | list[dict[str, Any]]
"""Text after a prompt of text; the assistant's messages after a prompt of messages."""


def text_of(completion: Completion) -> str:
    """The text; of messages that of the last one, of content parts those that are text."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A dot matches line ends too: completions have several lines."""
    return re.compile(pattern, re.DOTALL)


def last_match(pattern: str, text: str) -> str | None:
    """What the last match holds in its first group, or the match itself if the pattern has no group; None: no match."""
    compiled = compile_pattern(pattern)
    matches = deque(compiled.finditer(text), maxlen=1)
    if not matches:
        return None
    return matches[0][1 if compiled.groups else 0] or ""


def _check_pattern(pattern: str) -> str:
    try:
        compile_pattern(pattern)
    except re.error as error:
        raise ValueError(f"it is no regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_check_pattern)]
"""An option that is a regular expression."""
