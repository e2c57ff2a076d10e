"""From a row of somebody's data to a problem: which column is the prompt, which the reference answer."""

from typing import Any

import msgspec

from polyrhythm.errors import UserError
from polyrhythm.tasks.prompts import check_prompt
from polyrhythm.types import Problem

PROMPT_COLUMNS = ("prompt", "messages", "question", "problem", "instruction", "query")
ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "label", "reward_model.ground_truth")
"""The names people use, in the order in which they are looked for."""
RESERVED = ("prompts", "completions", "completion_ids", "finish_reason", "trainer_state", "log_extra", "log_metric")
"""Reward functions get these by name already."""


class Columns:
    """How the rows of one file are read. All columns go to the rewards under their own names, the reference as `answer` too.

    `renamed` gives columns other names first; an empty name leaves one out. A dotted name such as
    `reward_model.ground_truth` is a field inside a column.
    """

    def __init__(self, first_row: dict[str, Any], prompt_key: str, answer_key: str, renamed: dict[str, str]) -> None:
        self._renamed = renamed
        names = self._rename(first_row)
        self._prompt_key = prompt_key or next((name for name in PROMPT_COLUMNS if name in names), PROMPT_COLUMNS[0])
        self._answer_key = answer_key

    def problem(self, row: dict[str, Any], index: int, place: str) -> Problem:
        """The problem in this row; UserError, with its place and the fix, if there is none."""
        columns = self._rename(row)
        prompt = check_prompt(self._find(columns, self._prompt_key, "prompt", place), place)
        if self._prompt_key == "prompt":
            del columns["prompt"]
        if self._answer_key:
            columns["answer"] = self._find(columns, self._answer_key, "answer", place)
        elif usual := next((name for name in ANSWER_COLUMNS if _has(columns, name)), ""):
            columns["answer"] = _get(columns, usual)
        for name in RESERVED:
            if name in columns:
                raise UserError(
                    f"{place}: the column {name!r} is taken by what every reward function is given: rename it with "
                    f'task.options.columns = {{{name} = "another_name"}}'
                )
        return Problem(index=index, prompt=prompt, columns=_plain(columns, place))

    def _rename(self, row: dict[str, Any]) -> dict[str, Any]:
        if not self._renamed:
            return dict(row)
        renamed = {name: value for name, value in row.items() if name not in self._renamed}
        for old, new in self._renamed.items():
            if new and _has(row, old):
                renamed[new] = _get(row, old)
        return renamed

    def _find(self, columns: dict[str, Any], name: str, what: str, place: str) -> Any:
        if _has(columns, name):
            return _get(columns, name)
        found = ", ".join(columns) or "nothing"
        raise UserError(f"{place}: no column {name!r}, only {found}: task.options.{what}_key says where the {what} is")


def _has(row: dict[str, Any], name: str) -> bool:
    if name in row:
        return True
    outer, dot, inner = name.partition(".")
    return bool(dot) and isinstance(row.get(outer), dict) and _has(row[outer], inner)


def _get(row: dict[str, Any], name: str) -> Any:
    if name in row:
        return row[name]
    outer, _, inner = name.partition(".")
    return _get(row[outer], inner)


def _plain(columns: dict[str, Any], place: str) -> dict[str, Any]:
    """What can be sent to the rewards: dates become text, tuples lists; UserError names a column that cannot be."""
    for name, value in columns.items():
        try:
            columns[name] = msgspec.to_builtins(value)
            msgspec.msgpack.encode(columns[name])
        except OverflowError as error:
            raise UserError(f"{place}: a number in {name!r} needs more than 64 bits: write it as a string") from error
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{place}: the column {name!r} cannot be handed to a reward function: {error}: leave it out with "
                f'task.options.columns = {{{name} = ""}}'
            ) from error
    return columns
