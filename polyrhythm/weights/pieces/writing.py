"""The rows that a process holds, written into the files of a snapshot, each at its place, and digested meanwhile.

What is in memory in the right number format is written from where it is. What is on a device, or must be rounded, goes through
a ring of buffers, so that copying, digesting and writing overlap.
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import blake3
import torch

from polyrhythm.weights.export import Rows
from polyrhythm.weights.pieces.layout import PlannedFile, check_rows
from polyrhythm.weights.pieces.ring import Ring
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


def write_rows(folder: Path, layout: Manifest, exported: Iterable[Rows], ring: Ring) -> dict[str, list[Piece]]:
    """Write these rows; their pieces by tensor. When this returns they are on the disk."""
    digests: dict[str, list[Future[Piece]]] = {}
    writes: list[Future[None]] = []
    # BLAKE3 and pwrite() both release the interpreter, so the digests cost little beside the copy.
    with ExitStack() as closing, ThreadPoolExecutor(1) as digester, ThreadPoolExecutor(1) as writer:
        descriptors: dict[str, int] = {}
        for rows in exported:
            entry = layout.tensors.get(rows.name)
            if entry is None:
                raise SnapshotError(f"weights v{layout.version} were begun without a tensor {rows.name}")
            check_rows(rows, entry, layout.version)
            if entry.file not in descriptors:
                descriptors[entry.file] = os.open(folder / entry.file, os.O_RDWR)
                closing.callback(os.close, descriptors[entry.file])
            in_ring = needs_copy(rows)
            for start, numbers in _divided(rows):
                offset = rows.first_row * entry.row_bytes + start
                content = bytes_of(ring.copied(numbers, rows.published_dtype) if in_ring else numbers)
                digest = digester.submit(_digested, offset, content)
                write = writer.submit(_write_at, descriptors[entry.file], content, entry.offset + offset)
                digests.setdefault(rows.name, []).append(digest)
                writes.append(write)
                if in_ring:
                    ring.used_by([digest, write])
        for write in writes:
            write.result()
        for descriptor in descriptors.values():
            os.fsync(descriptor)
        return {name: [piece.result() for piece in pieces] for name, pieces in digests.items()}


def needs_copy(rows: Rows) -> bool:
    """Whether these rows are not in memory as they are to be in the file."""
    tensor = rows.rows
    return tensor.device.type != "cpu" or tensor.dtype != rows.published_dtype or not tensor.is_contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())  # pyright: ignore


def _divided(rows: Rows) -> Iterator[tuple[int, torch.Tensor]]:
    """The numbers of each piece, and where it begins in the file's bytes."""
    numbers, itemsize = rows.rows.detach().reshape(-1), rows.published_dtype.itemsize
    most = max(PIECE_BYTES // itemsize, 1)
    for start in range(0, numbers.numel(), most):
        yield start * itemsize, numbers[start : start + most]


def _digested(offset: int, content: memoryview) -> Piece:
    return Piece(offset, len(content), blake3.blake3(content).hexdigest())


def _write_at(descriptor: int, content: memoryview, offset: int) -> None:
    while content:  # pwrite() takes at most 2 GiB at a time
        num_bytes = os.pwrite(descriptor, content, offset)
        content, offset = content[num_bytes:], offset + num_bytes
