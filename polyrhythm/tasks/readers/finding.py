"""Which reader a path needs: by what it is on disk, by its ending, or because it can only be a dataset of the hub."""

import glob
import re
from collections.abc import Callable
from pathlib import Path

from polyrhythm.errors import UserError
from polyrhythm.tasks.readers.json_files import read_json, read_json_lines
from polyrhythm.tasks.readers.rows import Options, Rows

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def read_rows(path: str, options: Options) -> list[Rows]:
    """The rows of a file, of every file that a pattern such as `data/*.parquet` matches, of a folder or a hub dataset."""
    if glob.has_magic(path) and not Path(path).exists():
        found = sorted(glob.glob(str(Path(path).expanduser()), recursive=True))
        if not found:
            raise UserError(f"task.options.path={path!r} matches no file{_where_from(Path(path))}")
        return [_read(name, options) for name in found]
    return [_read(path, options)]


def _read(path: str, options: Options) -> Rows:
    local = Path(path).expanduser()
    if local.is_dir():
        return _tables().read_folder(local, options)
    reader = _reader_of(local)
    if local.exists() or reader:
        if options.split or options.subset:
            key = "split" if options.split else "subset"
            raise UserError(
                f"task.options.{key}={getattr(options, key)!r}: the file {path} has no {key}s: leave the option out"
            )
        return _read_file(local, reader)
    if HUB_ID.fullmatch(path):
        return _tables().read_hub(path, options)
    raise _cannot_be_read(local, "No such file or directory")


def _read_file(path: Path, reader: "Callable[[Path], Rows] | None") -> Rows:
    if reader is None:
        raise UserError(
            f"task.options.path={str(path)!r} ends in {path.suffix or 'nothing'!r}, which says not what is in it: "
            f"rename it to one of {', '.join(READERS)}"
        )
    try:
        with path.open("rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise _cannot_be_read(path, error.strerror or str(error)) from error
    if is_empty:
        raise UserError(f"task.options.path={str(path)!r} holds no problems: the file is empty")
    return reader(path)


def _cannot_be_read(path: Path, reason: str) -> UserError:
    return UserError(f"task.options.path={str(path)!r} cannot be read{_where_from(path)}: {reason}")


def _where_from(path: Path) -> str:
    return "" if path.is_absolute() else f" in the working directory {Path.cwd()}"


def _reader_of(path: Path) -> "Callable[[Path], Rows] | None":
    return READERS.get(path.suffix.lower())


def _tables():
    from polyrhythm.tasks.readers import tables

    return tables


READERS: "dict[str, Callable[[Path], Rows]]" = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json,
    ".parquet": lambda path: _tables().read_parquet(path),
    ".csv": lambda path: _tables().read_csv(path),
    ".tsv": lambda path: _tables().read_csv(path, separator="\t"),
}
"""By the ending of a file's name."""
