"""JSON: one object per line, or one list of objects. A mistake is found to the line."""

import re
from pathlib import Path
from typing import Any

import msgspec

from polyrhythm.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonRows:
    """All rows of a file, decoded; they keep their line, or their number in the list."""

    def __init__(self, rows: list[dict[str, Any]], places: list[str]) -> None:
        self._rows = rows
        self._places = places

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> dict[str, Any]:
        return self._rows[number]

    def place(self, number: int) -> str:
        return self._places[number]


def read_json_lines(path: Path) -> JsonRows:
    """One object per line; empty lines are skipped."""
    return _rows_of_lines(path, _content(path))


def read_json(path: Path) -> JsonRows:
    """A list of objects; or, as some files of this name are, one object per line."""
    content = _content(path)
    if not content.lstrip().startswith(b"["):
        return _rows_of_lines(path, content)
    try:
        items = msgspec.json.decode(content, type=list[Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}:{_line_of(error, content)}: {_broken(error)}") from error
    for number, item in enumerate(items, start=1):
        if not isinstance(item, dict):
            raise UserError(f"{path}, row {number}: not a JSON object, but {type(item).__name__}")
    return JsonRows(items, [f"{path}, row {number}" for number in range(1, len(items) + 1)])


def _content(path: Path) -> bytes:
    return path.read_bytes().removeprefix(BYTE_ORDER_MARK)


def _rows_of_lines(path: Path, content: bytes) -> JsonRows:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    rows, places = [], []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append(decode(line))
        except msgspec.ValidationError as error:
            raise UserError(f"{path}:{number}: not a JSON object: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path}:{number}: {_broken(error)}") from error
        places.append(f"{path}:{number}")
    return JsonRows(rows, places)


def _broken(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error.reason} {error.object[error.start]:#04x}: save the file as UTF-8"
    return f"broken JSON: {error}"


def _line_of(error: Exception, content: bytes) -> int:
    """The line of the byte at which decoding ended."""
    if isinstance(error, UnicodeDecodeError):
        offset = content.find(error.object) + error.start
    else:
        found = re.search(r"\(byte (\d+)\)", str(error))
        offset = int(found[1]) if found else len(content)
    return content.count(b"\n", 0, offset) + 1
