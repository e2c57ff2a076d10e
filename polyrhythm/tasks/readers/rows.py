"""What every reader gives: rows by number, and the place of each for messages."""

from typing import Any, NamedTuple, Protocol


class Rows(Protocol):
    """The rows of one file or dataset."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> dict[str, Any]:
        """The columns of this row, by name; the first row has the number 0."""
        ...

    def place(self, number: int) -> str:
        """Where the row is, such as `problems.jsonl:7` or `train.parquet, row 7`."""
        ...


class Options(NamedTuple):
    """What of a dataset with several parts is read."""

    split: str = ""
    subset: str = ""
