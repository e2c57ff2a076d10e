"""The conductor's memory on disk: where each step begins in the problems, and the groups that are finished.

A conductor that is started again on the same folder goes on from there; nothing finished is generated twice.
"""

import json
import logging
import os
import struct
from pathlib import Path

import msgspec

from polyrhythm.types import Group

HEADER = struct.Struct("<I")

log = logging.getLogger(__name__)


class Journal:
    """`cursors.json` has one number per step, `groups-<step>.msgpack` one frame per group, appended as it finishes."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._cursors = {0: 0} | self._read_cursors()

    def cursor(self, step: int) -> int | None:
        """How many problems were taken before this step; None when it was never reached."""
        return self._cursors.get(step)

    def set_cursor(self, step: int, cursor: int) -> None:
        if self._cursors.get(step) == cursor:
            return
        self._cursors[step] = cursor
        beside = self._cursors_path.with_suffix(".new")
        with beside.open("w") as file:
            json.dump(self._cursors, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._cursors_path)

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

    def _read_cursors(self) -> dict[int, int]:
        if not self._cursors_path.exists():
            return {}
        return {int(step): cursor for step, cursor in json.loads(self._cursors_path.read_text()).items()}

    @property
    def _cursors_path(self) -> Path:
        return self._folder / "cursors.json"

    def _groups_path(self, step: int) -> Path:
        return self._folder / f"groups-{step:09d}.msgpack"
