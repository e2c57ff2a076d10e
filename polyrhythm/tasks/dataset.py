"""Problems from files and datasets: rows with a prompt and whatever the reward functions need."""

from pathlib import Path
from typing import Any

import msgspec
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from polyrhythm.errors import UserError
from polyrhythm.types import ChatMessage, Problem

# Reward functions get these by name already.
RESERVED_KEYS = ("prompts", "completions", "completion_ids")


@dataclass(config=ConfigDict(extra="forbid", strict=True), kw_only=True)
class DatasetTask:
    """The lines of `path`; `prompt_key` holds text or chat messages, all other keys go to the rewards as columns.

    With `correct_above` a completion with a higher reward counts as correct, and the run has an accuracy.
    """

    path: str = Field(min_length=1)
    prompt_key: str = Field("prompt", min_length=1)
    correct_above: float | None = None

    reward = None
    stop = ()

    def __post_init__(self) -> None:
        self._problems = read_problems(Path(self.path).expanduser(), self.prompt_key)

    @property
    def num_problems(self) -> int:
        return len(self._problems)

    def problem(self, index: int) -> Problem:
        return self._problems[index]


def read_problems(path: Path, prompt_key: str) -> list[Problem]:
    """All problems of the file, checked line by line; empty lines are skipped."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        where = "" if path.is_absolute() else f" in the working directory {Path.cwd()}"
        raise UserError(f"task.options.path={str(path)!r} cannot be read{where}: {error.strerror}") from error
    problems: list[Problem] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            problems.append(_parse_problem(line, len(problems), prompt_key, place=f"{path}:{number}"))
    if not problems:
        raise UserError(f"task.options.path={str(path)!r} holds no problems: write one JSON object per line into it")
    return problems


def _parse_problem(line: bytes, index: int, prompt_key: str, place: str) -> Problem:
    try:
        columns = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise UserError(f"{place}: not a JSON object: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{place}: broken JSON: {error}") from error
    if prompt_key not in columns:
        found = ", ".join(columns) or "{}"
        raise UserError(
            f"{place}: no key {prompt_key!r}, only {found}: task.options.prompt_key says where the prompt is"
        )
    for key in RESERVED_KEYS:
        if key in columns and key != prompt_key:
            raise UserError(f"{place}: the key {key!r} is taken by what every reward function is given: rename it")
    problem = Problem(index=index, prompt=_check_prompt(columns.pop(prompt_key), place), columns=columns)
    try:
        msgspec.msgpack.encode(problem)
    except OverflowError as error:
        raise UserError(f"{place}: a number needs more than 64 bits: write it as a string") from error
    return problem


def _check_prompt(prompt: Any, place: str) -> str | list[ChatMessage]:
    try:
        checked = msgspec.convert(prompt, str | list[ChatMessage])
    except msgspec.ValidationError as error:
        raise UserError(f"{place}: the prompt is neither text nor a list of chat messages: {error}") from error
    if not checked:
        raise UserError(f"{place}: the prompt is empty")
    if isinstance(checked, list):
        for message in checked:
            if not {"role", "content"} <= message.keys():
                raise UserError(f"{place}: a chat message needs role and content, this one has {', '.join(message)}")
    return checked
