"""The rows that a process holds, read from a snapshot or compared with it. Every piece that they touch must have its digest.

Borders of pieces are those of whoever wrote them. What lies in a piece and is not ours is read too, digested and dropped.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import blake3
import torch

from polyrhythm.weights.export import Rows
from polyrhythm.weights.pieces.layout import DTYPES, check_rows
from polyrhythm.weights.pieces.writing import bytes_of
from polyrhythm.weights.snapshot import Manifest, Piece, SnapshotError, TensorEntry

NUM_READERS = 2
_CHUNK_BYTES = 1 << 19


def check_fit(manifest: Manifest, exported: list[Rows], *, is_part: bool = False, widens: bool = False) -> None:
    """Raises unless these are rows of the tensors that the version has; of all of them, unless a part is wanted.

    Numbers of 16 bits may be `widened` to fp32, which is exact.
    """
    asked = {rows.name for rows in exported}
    odd = asked - manifest.tensors.keys() if is_part else asked ^ manifest.tensors.keys()
    if odd:
        named = ", ".join(sorted(odd)[:3])
        raise SnapshotError(f"weights v{manifest.version} are of another model: they differ in {named}")
    for rows in exported:
        check_rows(rows, manifest.tensors[rows.name], manifest.version, widens=widens)


def is_held(manifest: Manifest, exported: Iterable[Rows]) -> bool:
    """Whether no piece has bytes besides these rows, so that they can be verified without any file."""
    for rows in exported:
        entry = manifest.tensors[rows.name]
        first, behind = _span(rows, entry)
        if any(piece.offset < first or piece.end > behind for piece in _touched(entry, first, behind)):
            return False
    return True


class SnapshotReader:
    """The open files of a version."""

    def __init__(self, folder: Path, manifest: Manifest):
        self._folder = folder
        self._manifest = manifest
        self._descriptors: dict[str, int] = {}
        self._closing = ExitStack()

    def __enter__(self) -> "SnapshotReader":
        try:
            for name, num_bytes in self._manifest.files.items():
                self._descriptors[name] = self._open(self._folder / name, num_bytes)
        except SnapshotError:
            self._closing.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def _open(self, path: Path, num_bytes: int) -> int:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise SnapshotError(f"cannot open {path}: {error.strerror}") from None
        self._closing.callback(os.close, descriptor)
        size = os.fstat(descriptor).st_size
        if size != num_bytes:
            raise SnapshotError(f"{path} has {size} bytes instead of {num_bytes}: the snapshot is torn")
        return descriptor

    def read(self, entry: TensorEntry, offset: int, chunk: memoryview) -> None:
        """Fill `chunk` with bytes of a tensor."""
        descriptor, offset = self._descriptors[entry.file], entry.offset + offset
        while chunk:
            num_bytes = os.preadv(descriptor, [chunk], offset)
            if not num_bytes:
                raise SnapshotError("the snapshot has become shorter while it was read: it is torn")
            chunk, offset = chunk[num_bytes:], offset + num_bytes


def read_into(exported: Iterable[Rows], manifest: Manifest, reader: SnapshotReader) -> None:
    """Fill these rows; raises unless every digest of what has arrived is right."""

    def is_wrong(rows: Rows) -> bool:
        target, entry = rows.rows, manifest.tensors[rows.name]
        dtype = DTYPES[entry.dtype]
        is_in_place = target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype
        arrived = target if is_in_place else torch.empty(target.shape, dtype=dtype)
        wrong = _is_wrong(rows, bytes_of(arrived), entry, reader, is_read=True)
        if not is_in_place:
            target.copy_(arrived)
        return wrong

    _refuse_wrong(exported, manifest.version, is_wrong)


def verify(exported: Iterable[Rows], manifest: Manifest, reader: SnapshotReader | None) -> None:
    """Raises unless these rows are what was published. Without a reader if they are held whole."""

    def is_wrong(rows: Rows) -> bool:
        held = bytes_of(rows.rows.to(rows.published_dtype))
        return _is_wrong(rows, held, manifest.tensors[rows.name], reader, is_read=False)

    _refuse_wrong(exported, manifest.version, is_wrong)


def _refuse_wrong(exported: Iterable[Rows], version: int, is_wrong: Callable[[Rows], bool]) -> None:
    listed = list(exported)
    with ThreadPoolExecutor(NUM_READERS) as readers:
        wrong = [rows.name for rows, wrong in zip(listed, readers.map(is_wrong, listed), strict=True) if wrong]
    if wrong:
        raise SnapshotError(f"{wrong[0]} of weights v{version} is not what was published: digests differ")


def _is_wrong(
    rows: Rows, held: memoryview, entry: TensorEntry, reader: SnapshotReader | None, *, is_read: bool
) -> bool:
    first, behind = _span(rows, entry)
    touched = _touched(entry, first, behind)
    return any(_digest(piece, held, first, entry, reader, is_read=is_read) != piece.digest for piece in touched)


def _digest(
    piece: Piece, held: memoryview, first: int, entry: TensorEntry, reader: SnapshotReader | None, *, is_read: bool
) -> str:
    """Of a piece: our bytes of it as we hold them, or as they are read into `held`, and the others as they are read."""
    digest = blake3.blake3()
    ours, behind = max(piece.offset, first), min(piece.end, first + len(held))
    for begin, end in ((piece.offset, ours), (ours, behind), (behind, piece.end)):
        is_ours = begin == ours
        # What is read is digested a chunk at a time, while it is in the cache; both let other threads run.
        step = max(end - begin, 1) if is_ours and not is_read else _CHUNK_BYTES
        for start in range(begin, end, step):
            stop = min(start + step, end)
            chunk = held[start - first : stop - first] if is_ours else memoryview(bytearray(stop - start))
            if is_read or not is_ours:
                assert reader is not None, "verified without files, and a piece is not held whole"
                reader.read(entry, start, chunk)
            digest.update(chunk)
    return digest.hexdigest()


def _span(rows: Rows, entry: TensorEntry) -> tuple[int, int]:
    """First byte of these rows in their tensor, and the first one behind them."""
    first = rows.first_row * entry.row_bytes
    return first, first + rows.rows.numel() * DTYPES[entry.dtype].itemsize


def _touched(entry: TensorEntry, first: int, behind: int) -> list[Piece]:
    return [piece for piece in entry.pieces if piece.end > first and piece.offset < behind]
