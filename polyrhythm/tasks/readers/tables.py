"""Parquet, csv, folders of `save_to_disk` and datasets of the hub: what the library `datasets` reads, and its only import."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from polyrhythm.errors import UserError
from polyrhythm.tasks.readers.rows import Options

NUM_READ_AHEAD = 1000
SAVED_TO_DISK = ("dataset_dict.json", "state.json")


class TableRows:
    """Rows that stay in the library's memory-mapped table; whoever reads them in order gets them by the block."""

    def __init__(self, table: Any, name: str) -> None:
        self._table = table
        self._name = name
        self._block: dict[str, list[Any]] = {}
        self._block_start = self._block_end = 0

    def __len__(self) -> int:
        return len(self._table)

    def row(self, number: int) -> dict[str, Any]:
        if number == self._block_end:
            self._block_start, self._block_end = number, min(number + NUM_READ_AHEAD, len(self))
            self._block = self._table[self._block_start : self._block_end]
        if self._block_start <= number < self._block_end:
            return {name: values[number - self._block_start] for name, values in self._block.items()}
        return self._table[number]

    def place(self, number: int) -> str:
        return f"{self._name}, row {number + 1}"


def read_parquet(path: Path) -> TableRows:
    with _explained(f"{path} cannot be read as parquet"), _quiet():
        return _rows(datasets.load_dataset("parquet", data_files=str(path), split="train"), str(path))


def read_csv(path: Path, separator: str = ",") -> TableRows:
    """Cells that look like numbers are numbers; an empty cell is None, and nothing else is: NA and None may be answers."""
    _check_utf8(path)
    options = {"sep": separator, "keep_default_na": False, "na_values": [""]}
    with _explained(f"{path} cannot be read as csv"), _quiet():
        return _rows(datasets.load_dataset("csv", data_files=str(path), split="train", **options), str(path))


def read_folder(path: Path, options: Options) -> TableRows:
    """A folder that `save_to_disk` wrote, or one of data files as the hub has them."""
    if not any((path / name).is_file() for name in SAVED_TO_DISK):
        return _load(str(path), options)
    with _explained(f"{path} cannot be read as a folder of save_to_disk"), _quiet():
        saved = datasets.load_from_disk(str(path))
    return _rows(_choose_split(saved, str(path), options.split), str(path))


def read_hub(name: str, options: Options) -> TableRows:
    try:
        return _load(name, options)
    except ConnectionError as error:
        raise UserError(
            f"task.options.path={name!r} is no file or folder here, and the hub cannot be asked for a dataset of this name: "
            f"{_first_line(error)}: check the name and the connection, or give a local copy"
        ) from error


def _load(name: str, options: Options) -> TableRows:
    place = f"task.options.path={name!r}"
    with _explained(place, let_through=ConnectionError), _quiet():
        # All splits only if none is asked for: the library downloads what it is told to load.
        loaded = datasets.load_dataset(name, options.subset or None, split=options.split or None)
    if options.split:
        return _rows(loaded, f"{name} ({options.split})")
    return _rows(_choose_split(loaded, name, ""), name)


def _choose_split(loaded: Any, name: str, split: str) -> Any:
    """The split asked for, else the one for training, else the only one."""
    if not isinstance(loaded, dict):
        if split:
            raise UserError(f"task.options.split={split!r}: {name} has no splits: leave the option out")
        return loaded
    wanted = split or ("train" if "train" in loaded else "")
    if not wanted and len(loaded) == 1:
        (wanted,) = loaded
    if wanted not in loaded:
        said = f"task.options.split={split!r} is not" if split else "task.options.split is missing: say which"
        raise UserError(f"{said} one of the splits of {name}: {', '.join(map(str, loaded))}")
    return loaded[wanted]


def _rows(table: Any, name: str) -> TableRows:
    if not len(table):
        raise UserError(f"task.options.path={name!r} holds no problems: it has no rows")
    for column, feature in table.features.items():
        if type(feature).__name__ in ("Image", "Audio", "Video"):
            raise UserError(
                f"{name}: the column {column!r} holds {type(feature).__name__.lower()}s, and models here read text: remove it"
            )
    return TableRows(table.with_format(None), name)


def _check_utf8(path: Path) -> None:
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}:{line}: not UTF-8: {error.reason} {content[error.start]:#04x}: save the file as UTF-8"
        ) from None


@contextlib.contextmanager
def _explained(place: str, let_through: type[Exception] = UserError) -> Iterator[None]:
    try:
        yield
    except (UserError, let_through):
        raise
    # The library passes on whatever pandas, pyarrow, fsspec and the hub raise.
    except Exception as error:
        if "corresponds to no data" in str(error):
            raise UserError(f"{place}: it holds no problems: it has no rows") from error
        raise UserError(f"{place}: {_first_line(error.__cause__ or error)}{_advice(error)}") from error


def _advice(error: Exception) -> str:
    said = str(error)
    if "onfig name is missing" in said or "BuilderConfig" in said:
        return " (task.options.subset)"
    return " (task.options.split)" if "split" in said.lower() else ""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's progress bars and log lines: what goes wrong is said once, by us."""
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
