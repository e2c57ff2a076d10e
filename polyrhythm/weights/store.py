"""Versioned weight snapshots: published whole, verified before they are used.

A version is a folder `v00000012` holding `model.safetensors`, or several such files, and `manifest.json` with BLAKE3 digests. It
is written under another name and appears by one rename, so a reader sees all of it or nothing. Folders of versions that are
no longer kept become the space for the next one: on Linux a page that exists already is ten times cheaper to write than
a new one (1.4 s against 0.15 s for half a gigabyte in shared memory).
"""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import torch

from polyrhythm.errors import RunError
from polyrhythm.weights.export import Rows, whole
from polyrhythm.weights.pieces.layout import DTYPE_NAMES, DTYPES, LAYOUT_FILE, manifest_of, plan_files, read_layout
from polyrhythm.weights.pieces.reading import SnapshotReader, check_fit, is_held, read_into, verify
from polyrhythm.weights.pieces.ring import Ring
from polyrhythm.weights.pieces.writing import PIECE_BYTES, make_files, write_rows
from polyrhythm.weights.snapshot import (
    MANIFEST_FILE,
    Manifest,
    Piece,
    Probe,
    SnapshotError,
    TensorEntry,
    Written,
    merged_pieces,
    read_manifest,
    snapshot_folder,
    versions_in,
)

MIB = 2**20
_SPARE = ".spare"
_STAGING = ".staging"
"""Each version has its own, so that a writer that was given up and wakes later does not touch what another one makes."""


def can_be_stored(tensor: torch.Tensor) -> bool:
    return tensor.dtype in DTYPE_NAMES and tensor.layout is torch.strided


def space_for(entry: TensorEntry, num_rows: int | None = None) -> torch.Tensor:
    """An empty tensor into which that of a manifest can be read, or so many rows of it."""
    shape = entry.shape if num_rows is None else [num_rows, *entry.shape[1:]]
    return torch.empty(shape, dtype=DTYPES[entry.dtype])


class WeightStore:
    """The snapshots under one root folder; any number of readers, one version at a time in the making.

    One process publishes whole tensors by `publish`. Several that hold some rows each make a version together: one begins
    it, then each writes its own rows, then the one finishes it with what all of them say that they have written:

        store.begin(exported(policy), version)             # the writer
        written = store.write_rows(exported(policy), version)          # every rank, when the writer has begun
        store.finish(version, replica.gather(written), probe)          # the writer

    Nobody gathers a tensor, and readers may divide the rows in another way than the writers did.
    """

    def __init__(self, root: Path, keep: int = 2, file_mb: int = 4096):
        self.root = Path(root)
        self.keep = keep
        self.file_bytes = file_mb * MIB
        self._ring = Ring(PIECE_BYTES)

    def folder(self, version: int) -> Path:
        return snapshot_folder(self.root, version)

    def versions(self) -> list[int]:
        return versions_in(self.root)

    def local_folder(self, version: int) -> Path:
        """Where the files of `version` are on this machine; they are not verified yet."""
        return self.folder(version)

    def refuse(self, version: int) -> None:
        """What is here of `version` has turned out to be damaged."""

    def publish(self, exported: Iterable[Rows], version: int, probe: Probe | None = None) -> Path:
        """Write what is exported as `version`; when this returns, the version is complete and visible.

        Engines load only what has a probe.
        """
        exported = list(exported)
        try:
            self.begin(exported, version)
            return self.finish(version, [self.write_rows(exported, version)], probe)
        except RunError:
            shutil.rmtree(self._staging(version), ignore_errors=True)
            raise

    def begin(self, layout: Iterable[Rows], version: int) -> None:
        """Make the files of `version`, out of sight. One `Rows` for each tensor says its name, its shape and its number format.

        How many rows are in it does not matter.
        """
        with self._publishing(version):
            files = plan_files(layout, self.file_bytes)
            staging = self._staging(version)
            self._take_spare(staging)
            staging.mkdir(parents=True, exist_ok=True)
            make_files(staging, files)
            (staging / LAYOUT_FILE).write_bytes(msgspec.json.encode(manifest_of(files, version)))

    def write_rows(self, exported: Iterable[Rows], version: int) -> Written:
        """Write the rows that this process holds into what was begun; what it says goes to `finish`."""
        staging = self._staging(version)
        with self._publishing(version):
            return Written(version, write_rows(staging, read_layout(staging, version), exported, self._ring))

    def finish(self, version: int, written: Iterable[Written], probe: Probe | None = None) -> Path:
        """Make `version` visible if every row of every tensor has been written, once; the manifest comes last."""
        staging, target = self._staging(version), self.folder(version)
        pieces: dict[str, list[Piece]] = {}
        for part in written:
            for name, own in part.pieces.items():
                pieces.setdefault(name, []).extend(own)
        with self._publishing(version):
            manifest = merged_pieces(read_layout(staging, version), pieces)
            (staging / LAYOUT_FILE).unlink()
            for name in manifest.files:
                _sync(staging / name)  # headers too, which others have not written
            _write_file(staging / MANIFEST_FILE, msgspec.json.encode(msgspec.structs.replace(manifest, probe=probe)))
            if target.exists():  # a step that is run again after a crash publishes its version again
                shutil.rmtree(target)  # only now: what was there stays until the new one is complete
            os.rename(staging, target)
            _sync(self.root)
        self._retire(version)
        return target

    def load_into(self, targets: Mapping[str, torch.Tensor], version: int) -> Manifest:
        """Read `version` into these tensors in place; raises unless every digest of what has arrived is right.

        Numbers of 16 bits are widened to fp32 where the targets are, which is exact. After a failure they hold nothing that may be used.
        """
        return self.load_rows_into((whole(name, tensor) for name, tensor in targets.items()), version)

    def load_part_into(self, targets: Mapping[str, torch.Tensor], version: int) -> None:
        """As `load_into`, but only these tensors of those that the version has."""
        self.load_rows_into((whole(name, tensor) for name, tensor in targets.items()), version, is_part=True)

    def load_rows_into(self, targets: Iterable[Rows], version: int, *, is_part: bool = False) -> Manifest:
        """As `load_into`, but only the rows that this process holds of each tensor; of some tensors only, if it is a part."""
        targets = list(targets)
        with self._refusing_damage(version):
            folder = self.local_folder(version)
            manifest = read_manifest(folder.parent, version)
            check_fit(manifest, targets, is_part=is_part, widens=True)
            with SnapshotReader(folder, manifest) as reader:
                read_into(targets, manifest, reader)
        return manifest

    def verify(self, exported: Iterable[Rows], version: int) -> None:
        """Raises unless what is exported, whole tensors or rows of them, is what was published as `version`, to the last bit."""
        exported = list(exported)
        with self._refusing_damage(version):
            manifest = self.manifest(version)
            check_fit(manifest, exported)
            if is_held(manifest, exported):
                verify(exported, manifest, None)
            else:
                with SnapshotReader(self.local_folder(version), manifest) as reader:
                    verify(exported, manifest, reader)

    def manifest(self, version: int) -> Manifest:
        """What is in `version`."""
        return read_manifest(self.local_folder(version).parent, version)

    def contents(self, version: int, piece_bytes: int) -> Iterator[torch.Tensor]:
        """The bytes of all tensors, one after the other in the manifest's order, in pieces of this size; the last is shorter.

        A piece is there until the next.
        """
        folder = self.local_folder(version)
        manifest = read_manifest(folder.parent, version)
        space, filled = torch.empty(piece_bytes, dtype=torch.uint8), 0
        with SnapshotReader(folder, manifest) as reader:
            for entry in manifest.tensors.values():
                offset = 0
                while offset < entry.num_bytes:
                    num_bytes = min(entry.num_bytes - offset, piece_bytes - filled)
                    chunk = memoryview(space.numpy())[filled : filled + num_bytes]  # pyright: ignore
                    reader.read(entry, offset, chunk)
                    offset, filled = offset + num_bytes, filled + num_bytes
                    if filled == piece_bytes:
                        yield space
                        filled = 0
        if filled:
            yield space[:filled]

    @contextmanager
    def _refusing_damage(self, version: int) -> Iterator[None]:
        try:
            yield
        except SnapshotError:
            self.refuse(version)
            raise

    @contextmanager
    def _publishing(self, version: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            is_full = error.errno == errno.ENOSPC
            hint = ": make room (weights go to weights.root, checkpoints to output_dir)" if is_full else ""
            raise RunError(f"publishing weights v{version} in {self.root} failed: {error.strerror}{hint}") from error

    def _staging(self, version: int) -> Path:
        return self.root / f"{_STAGING}-{self.folder(version).name}"

    def _take_spare(self, staging: Path) -> None:
        if not staging.exists():
            with suppress(FileNotFoundError):
                os.rename(self.root / _SPARE, staging)

    def _retire(self, newest: int) -> None:
        """Keep the newest versions; one older folder becomes the space of the next, the rest go, and what was never finished."""
        kept = [version for version in self.versions() if version <= newest][-self.keep :]
        spare = self.root / _SPARE
        for version in self.versions():
            if version not in kept:
                if spare.exists():
                    shutil.rmtree(self.folder(version))
                else:
                    os.rename(self.folder(version), spare)
        for unfinished in self.root.glob(f"{_STAGING}*"):
            if unfinished.name <= self._staging(newest).name:
                shutil.rmtree(unfinished, ignore_errors=True)


def _write_file(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
