"""Rows that a script gave, kept in the run folder: the run can then be resumed, and repeated exactly."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from polyrhythm.errors import UserError

Rows = Sequence[Mapping[str, Any]]
FILE, FOLDER = "dataset.jsonl", "dataset"
WHAT_IT_CAN_BE = "a list of dicts, a datasets.Dataset, the path of a file or folder, a hub id, or the class of a task"


@runtime_checkable
class Saved(Protocol):
    """A datasets.Dataset, as far as it is of interest here: nothing has to be imported to keep one."""

    @property
    def column_names(self) -> list[str]: ...

    def save_to_disk(self, dataset_path: str) -> None: ...


def keep_rows(rows: "Rows | Saved", folder: Path) -> Path:
    """Write the rows into `folder`; the file or folder that task.options.path can name."""
    if isinstance(rows, Saved):
        if isinstance(rows.column_names, Mapping):
            raise UserError(
                f"dataset has the splits {', '.join(rows.column_names)}: give one of them, such as dataset['train']"
            )
        rows.save_to_disk(str(folder / FOLDER))
        return folder / FOLDER
    path = folder / FILE
    path.write_text("".join(_line(row, index) for index, row in enumerate(rows)), encoding="utf-8")
    return path


def is_rows(dataset: object) -> bool:
    """Whether it holds problems itself, and does not only say where they are."""
    return isinstance(dataset, Saved) or (isinstance(dataset, Sequence) and not isinstance(dataset, str | bytes))


def _line(row: object, index: int) -> str:
    if not isinstance(row, Mapping):
        raise UserError(f"dataset[{index}] is {row!r}: a row is a dict, such as {{'prompt': '2+2=', 'answer': '4'}}")
    try:
        return json.dumps(dict(row), allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise UserError(
            f"dataset[{index}] cannot be kept in the run folder: {error}: use text, numbers, lists and dicts"
        ) from None
