"""Which tensor is where: ordinary safetensors files, whose headers are known before the first number is written."""

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from polyrhythm.weights.export import Rows
from polyrhythm.weights.snapshot import WEIGHTS_FILE, Manifest, SnapshotError, TensorEntry

LAYOUT_FILE = "layout.json"
"""A manifest without digests, for the processes that write a version; it goes when the manifest is there."""
DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64",
               torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
               torch.bool: "BOOL"}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_HEADER_ALIGNMENT = 64


class PlannedFile(NamedTuple):
    """A file of a snapshot that is still to be filled."""

    name: str
    header: bytes
    num_bytes: int
    tensors: dict[str, TensorEntry]


def plan_files(layout: Iterable[Rows], file_bytes: int) -> list[PlannedFile]:
    """Files of at most so many bytes of tensors; a tensor that is larger has one for itself. Only names, shapes and types count."""
    groups: list[list[Rows]] = [[]]
    room = file_bytes
    for rows in layout:
        num_bytes = _num_bytes(rows)
        if num_bytes > room and groups[-1]:
            groups.append([])
            room = file_bytes
        groups[-1].append(rows)
        room -= num_bytes
    return [_plan_file(name, group) for name, group in zip(_file_names(len(groups)), groups, strict=True)]


def manifest_of(files: Iterable[PlannedFile], version: int) -> Manifest:
    """Without digests yet."""
    sizes, tensors = {}, {}
    for file in files:
        sizes[file.name] = file.num_bytes
        tensors |= file.tensors
    return Manifest(version, sum(sizes.values()), tensors, files=sizes)


def read_layout(folder: Path, version: int) -> Manifest:
    """What `begin` has planned; whoever writes rows asks for it."""
    try:
        return msgspec.json.decode((folder / LAYOUT_FILE).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise SnapshotError(
            f"weights v{version} cannot be written to {folder}: nothing was begun there ({error}); "
            "weights.root must be a folder that all ranks of the trainer share"
        ) from None


def check_rows(rows: Rows, entry: TensorEntry, version: int, *, widens: bool = False) -> None:
    """Raises unless these are rows of that tensor, in its number format or, if that will do, in a wider one."""
    refuse_dtensor(rows)
    here, there = DTYPE_NAMES[rows.published_dtype], list(rows.shape)
    if entry.shape != there or (entry.dtype != here and not (widens and _is_widened(entry, here))):
        raise SnapshotError(f"{rows.name} is {entry.dtype}{entry.shape} in weights v{version}, "
                            f"the model has {here}{there}")  # fmt: skip
    if entry.num_bytes != prod(there) * DTYPES[entry.dtype].itemsize or entry.offset < 0:
        raise SnapshotError(f"{rows.name} has {entry.num_bytes} bytes at {entry.offset} in weights v{version}")
    held = list(rows.rows.shape)
    fits = held[1:] == there[1:] and rows.first_row + sum(held[:1]) <= sum(there[:1])
    if rows.first_row < 0 or len(held) != len(there) or not fits:
        raise SnapshotError(f"{rows.name}: {held} from row {rows.first_row} on are not rows of {there}")


def refuse_dtensor(rows: Rows) -> None:
    """A DTensor says that it is the whole tensor and holds a part of it."""
    if hasattr(rows.rows, "to_local"):
        raise SnapshotError(f"{rows.name} is a DTensor: export the rows that this rank holds (its local tensor)")


def _num_bytes(rows: Rows) -> int:
    return prod(rows.shape) * rows.published_dtype.itemsize


def _is_widened(entry: TensorEntry, here: str) -> bool:
    """Whether every number of the file is one here, too."""
    return here == "F32" and entry.dtype in ("BF16", "F16")


def _plan_file(name: str, group: Iterable[Rows]) -> PlannedFile:
    """The header is written here because the library would copy every tensor twice."""
    table, position = {}, 0
    for rows in group:
        refuse_dtensor(rows)
        end = position + _num_bytes(rows)
        table[rows.name] = {"dtype": DTYPE_NAMES[rows.published_dtype], "shape": list(rows.shape),
                            "data_offsets": [position, end]}  # fmt: skip
        position = end
    text = json.dumps(table).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    tensors = {
        tensor: TensorEntry(
            dtype=said["dtype"], shape=said["shape"], offset=len(header) + said["data_offsets"][0],
            num_bytes=said["data_offsets"][1] - said["data_offsets"][0], file=name,
        )
        for tensor, said in table.items()
    }  # fmt: skip
    return PlannedFile(name, header, len(header) + position, tensors)


def _file_names(num: int) -> list[str]:
    if num == 1:
        return [WEIGHTS_FILE]
    stem, ending = WEIGHTS_FILE.split(".")
    return [f"{stem}-{index:05d}-of-{num:05d}.{ending}" for index in range(1, num + 1)]
