"""The rows that a process holds, written into the files of a snapshot, each at its place, and digested meanwhile."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import blake3
import torch

from polyrhythm.weights.export import Rows
from polyrhythm.weights.pieces.layout import PlannedFile, check_rows
from polyrhythm.weights.snapshot import Manifest, Piece, SnapshotError

PIECE_BYTES = 64 * 2**20
"""At most. Who reads rows with other borders than a writer's reads and digests the pieces that it touches, and nothing else."""


def make_files(folder: Path, planned: Iterable[PlannedFile]) -> None:
    """Files of full size with their headers. Pages of files that are there already are used again."""
    names = set()
    for file in planned:
        names.add(file.name)
        descriptor = os.open(folder / file.name, os.O_RDWR | os.O_CREAT, 0o644)
        with ExitStack() as closing:
            closing.callback(os.close, descriptor)
            os.ftruncate(descriptor, file.num_bytes)
            _write_at(descriptor, memoryview(file.header), 0)
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


def write_rows(folder: Path, layout: Manifest, exported: Iterable[Rows]) -> dict[str, list[Piece]]:
    """Write these rows; their pieces by tensor. When this returns they are on the disk."""
    futures: dict[str, list[Future[Piece]]] = {}
    # BLAKE3 and pwrite() both release the interpreter, so the digests cost little beside the copy.
    with ThreadPoolExecutor(1) as digester, ExitStack() as closing:
        descriptors: dict[str, int] = {}
        for rows in exported:
            entry = layout.tensors.get(rows.name)
            if entry is None:
                raise SnapshotError(f"weights v{layout.version} were begun without a tensor {rows.name}")
            check_rows(rows, entry, layout.version)
            if entry.file not in descriptors:
                descriptors[entry.file] = os.open(folder / entry.file, os.O_RDWR)
                closing.callback(os.close, descriptors[entry.file])
            for offset, content in _pieces_of(rows, entry.row_bytes):
                futures.setdefault(rows.name, []).append(digester.submit(_digested, offset, content))
                _write_at(descriptors[entry.file], content, entry.offset + offset)
        for descriptor in descriptors.values():
            os.fsync(descriptor)
        return {name: [piece.result() for piece in pieces] for name, pieces in futures.items()}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())  # pyright: ignore


def _pieces_of(rows: Rows, row_bytes: int) -> Iterator[tuple[int, memoryview]]:
    first, content = rows.first_row * row_bytes, bytes_of(rows.rows)
    for start in range(0, len(content), PIECE_BYTES):
        yield first + start, content[start : start + PIECE_BYTES]


def _digested(offset: int, content: memoryview) -> Piece:
    return Piece(offset, len(content), blake3.blake3(content).hexdigest())


def _write_at(descriptor: int, content: memoryview, offset: int) -> None:
    while content:  # pwrite() takes at most 2 GiB at a time
        num_bytes = os.pwrite(descriptor, content, offset)
        content, offset = content[num_bytes:], offset + num_bytes
