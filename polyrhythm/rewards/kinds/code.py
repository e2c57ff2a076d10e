"""Code: the share of tests that a program passes, in a sandbox that the user names. Nothing here runs what a model wrote."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from polyrhythm.errors import UserError
from polyrhythm.rewards.kinds.completions import Completion, last_match, text_of
from polyrhythm.user_code import find_kind

FENCED = r"```[^\n`]*\n(.*?)```"


@dataclass(config=ConfigDict(extra="forbid", strict=True), kw_only=True)
class Code:
    """The share of the column `tests` that the program in a completion passes: its last fenced block, or all of it without one.

    Called are `sandbox(code, tests)` or `await sandbox(code, tests)`, with the column as it is. It returns the share itself, from
    0 to 1, True or False, a list with True or False for each test, {"passed": 3, "total": 4}, or None where it cannot tell.
    """

    sandbox: str = Field(min_length=1)
    """Your function that runs code where it can do no harm, as module:function. A reward worker is no such place."""

    def __post_init__(self) -> None:
        function = find_kind("reward.options.code.sandbox", self.sandbox, {}, "sandbox")
        if not callable(function):
            raise UserError(f"reward.options.code.sandbox={self.sandbox!r} is {function!r}, which cannot be called")
        self._run: Callable[..., Any] = function

    async def __call__(self, completions: Sequence[Completion], tests: Sequence[Any], **_: Any) -> list[float | None]:
        runs = [self._score(text_of(text), tested) for text, tested in zip(completions, tests, strict=True)]
        return await asyncio.gather(*runs)

    async def _score(self, text: str, tests: Any) -> float | None:
        block = last_match(FENCED, text)
        code = text if block is None else block
        if not code.strip():
            return 0.0
        result = self._run(code, tests)
        return share_of(await result if inspect.isawaitable(result) else result)


def share_of(result: Any) -> float | None:
    """The share of tests that were passed, in what a sandbox returned."""
    if result is None:
        return None
    if isinstance(result, Mapping):
        passed, total = result["passed"], result["total"]
    elif isinstance(result, Sequence) and not isinstance(result, str | bytes):
        passed, total = sum(map(bool, result)), len(result)
    else:
        passed, total = float(result), 1
    share = passed / total if total else 0.0
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the sandbox of reward.options.code returned {result!r}, which is no share from 0 to 1")
    return share
