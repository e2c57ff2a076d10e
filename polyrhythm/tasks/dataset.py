"""Problems from files and datasets: rows with a prompt and whatever the reward functions need."""

from bisect import bisect_right
from itertools import accumulate
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from polyrhythm.errors import UserError
from polyrhythm.tasks.columns import Columns
from polyrhythm.tasks.readers import Options, Rows, read_rows
from polyrhythm.tasks.task import Part
from polyrhythm.types import Problem

Text = Annotated[str, Field(min_length=1)]


@dataclass(config=ConfigDict(extra="forbid", strict=True), kw_only=True)
class DatasetTask:
    """The rows of `path`: files (jsonl, json, parquet, csv), folders of `save_to_disk`, datasets of the hub, or a list of these.

    `weights` mix the entries of a list; without them their rows are one after another. `split` and `subset` choose in a
    dataset that has several. `prompt_key` and `answer_key` name columns that are not called as usual, `columns` renames.
    With `correct_above` a completion with a higher reward counts as correct, and the run has an accuracy.
    """

    path: Text | Annotated[list[Text], Field(min_length=1)]
    weights: list[float] = Field(default_factory=list)
    split: str = ""
    subset: str = ""
    prompt_key: str = ""
    answer_key: str = ""
    columns: dict[str, str] = Field(default_factory=dict)
    correct_above: float | None = None

    reward = None
    stop = ()

    def __post_init__(self) -> None:
        paths = [self.path] if isinstance(self.path, str) else self.path
        self._check_weights(paths)
        sources = [read_rows(path, Options(self.split, self.subset)) for path in paths]
        self._tables: list[Rows] = [rows for source in sources for rows in source]
        for path, source in zip(paths, sources, strict=True):
            if not any(map(len, source)):
                raise UserError(f"task.options.path={path!r} holds no problems: write one row for each")
        self._tables = [rows for rows in self._tables if len(rows)]
        self._columns = [Columns(rows.row(0), self.prompt_key, self.answer_key, self.columns) for rows in self._tables]
        self._ends = list(accumulate(map(len, self._tables)))
        ends = list(accumulate(sum(map(len, source)) for source in sources))
        self.parts = [
            Part(range(start, end), weight) for start, end, weight in zip([0, *ends], ends, self.weights, strict=False)
        ]

    @property
    def num_problems(self) -> int:
        return self._ends[-1]

    def problem(self, index: int) -> Problem:
        table = bisect_right(self._ends, index)
        rows, number = self._tables[table], index - (self._ends[table] - len(self._tables[table]))
        return self._columns[table].problem(rows.row(number), index, rows.place(number))

    def _check_weights(self, paths: list[str]) -> None:
        if self.weights and len(self.weights) != len(paths):
            raise UserError(
                f"task.options.weights={self.weights} are {len(self.weights)} weights for the {len(paths)} entries of "
                f"task.options.path={self.path!r}: give one for each, or none"
            )
