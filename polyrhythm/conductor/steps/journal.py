"""The conductor's memory on disk: where each step begins in the problems, and the groups that are finished.

A conductor that is started again on the same folder goes on from there; nothing finished is generated twice.
"""

import logging
import os
import struct
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from polyrhythm.types import Group

HEADER = struct.Struct("<I")

T = TypeVar("T")

log = logging.getLogger(__name__)


class Totals(msgspec.Struct, frozen=True):
    """What a run has added up before a step."""

    generated_tokens: int = 0
    trained_tokens: int = 0


class Journal:
    """`cursors.json` and `totals.json` have one entry per step, `groups-<step>.msgpack` one frame per group, appended as it finishes."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._cursors = {0: 0} | self._read("cursors.json", int)
        self._totals = self._read("totals.json", Totals)

    def cursor(self, step: int) -> int | None:
        """How many problems were taken before this step; None when it was never reached."""
        return self._cursors.get(step)

    def set_cursor(self, step: int, cursor: int) -> None:
        if self._cursors.get(step) == cursor:
            return
        self._cursors[step] = cursor
        self._write("cursors.json", self._cursors)

    def add_to_totals(self, step: int, generated_tokens: int, trained_tokens: int) -> Totals:
        """What the run has added up by the end of this step. A step that is made again counts once."""
        before = self._totals.get(step, Totals())
        totals = Totals(before.generated_tokens + generated_tokens, before.trained_tokens + trained_tokens)
        self._totals[step + 1] = totals
        self._write("totals.json", self._totals)
        return totals

    def add_group(self, group: Group) -> None:
        body = msgspec.msgpack.encode(group)
        with self._groups_path(group.step).open("ab") as file:
            file.write(HEADER.pack(len(body)) + body)

    def groups(self, step: int) -> list[Group]:
        """The groups of a step that were finished before; a frame that was cut off ends them."""
        path = self._groups_path(step)
        content = path.read_bytes() if path.exists() else b""
        groups, start = [], 0
        while start + HEADER.size <= len(content):
            end = start + HEADER.size + HEADER.unpack_from(content, start)[0]
            try:
                groups.append(msgspec.msgpack.decode(content[start + HEADER.size : end], type=Group))
            except msgspec.DecodeError:
                break
            start = end
        if start < len(content):
            log.warning("%s is cut off after %d groups", path, len(groups))
            with path.open("r+b") as file:
                file.truncate(start)
        return groups

    def forget_groups_before(self, step: int) -> None:
        for path in self._folder.glob("groups-*.msgpack"):
            if int(path.stem.removeprefix("groups-")) < step:
                path.unlink()

    def forget_groups_after(self, step: int) -> None:
        """A run that goes on at `step` makes later weights anew, and they need not be the same to the last bit."""
        for path in self._folder.glob("groups-*.msgpack"):
            if int(path.stem.removeprefix("groups-")) > step:
                path.unlink()

    def _read(self, name: str, kind: type[T]) -> dict[int, T]:
        path = self._folder / name
        return msgspec.json.decode(path.read_bytes(), type=dict[int, kind]) if path.exists() else {}  # pyright: ignore

    def _write(self, name: str, by_step: dict[int, Any]) -> None:
        beside = self._folder / f"{name}.new"
        with beside.open("wb") as file:
            file.write(msgspec.json.encode(by_step))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._folder / name)

    def _groups_path(self, step: int) -> Path:
        return self._folder / f"groups-{step:09d}.msgpack"
