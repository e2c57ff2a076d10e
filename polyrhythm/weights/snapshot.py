"""What a snapshot is on disk and on the wire: the names of its files and its manifest. Without torch, for those who only
pass snapshots on."""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import force_setattr

from polyrhythm.errors import RunError

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors", re.ASCII)
"""One file, or several of a larger model."""
MANIFEST_FILE = "manifest.json"
MAX_VERSION_DIGITS = 8
MIN_WRITING_DEADLINE_S = 30.0
SLOW_DISK_BYTES_PER_S = 50e6


class SnapshotError(RunError):
    """A snapshot is missing, incomplete, altered, or does not fit the model."""


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Bytes of a tensor that one process has written at a time, and their BLAKE3 digest."""

    offset: int
    """From the first byte of the tensor on."""
    num_bytes: int
    digest: str

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


class Written(msgspec.Struct, frozen=True):
    """What one process has written of a version, by the tensors' names."""

    version: int
    pieces: dict[str, list[Piece]]


class TensorEntry(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Where a tensor is, and how its bytes are divided into pieces: without gaps, in their order."""

    dtype: str
    shape: list[int]
    offset: int
    """In its file."""
    num_bytes: int
    pieces: list[Piece] = []
    file: str = WEIGHTS_FILE
    digest: str = ""
    """Of the whole tensor, as versions before 0.4.0 wrote it: one piece."""

    def __post_init__(self) -> None:
        if self.digest:
            force_setattr(self, "pieces", [Piece(0, self.num_bytes, self.digest)])
            force_setattr(self, "digest", "")

    @property
    def is_floating_point(self) -> bool:
        return self.dtype.startswith(("F", "BF"))

    @property
    def row_bytes(self) -> int:
        """Of one row, along the first dimension."""
        return self.num_bytes // self.shape[0] if self.shape and self.shape[0] else self.num_bytes


class Probe(msgspec.Struct, frozen=True):
    """What these weights compute, so that an engine can prove that it computes with them; see `weights/proof.py`."""

    seed: int
    sequences: list[list[int]]
    logprobs: list[float]
    """Of every token but the first of each sequence, one sequence after the other."""
    canary_logprobs: list[float]
    """The same by the canary of the seed."""
    number_format: str
    """What the trainer has computed them in."""


class Manifest(msgspec.Struct, frozen=True):
    version: int
    num_bytes: int
    """Of all files."""
    tensors: dict[str, TensorEntry]
    probe: Probe | None = None
    """None in what is not for engines, such as a checkpoint."""
    files: dict[str, int] = {}
    """Their sizes; versions before 0.4.0 had one file and did not say so."""

    def __post_init__(self) -> None:
        if not self.files:
            force_setattr(self, "files", {WEIGHTS_FILE: self.num_bytes})


def snapshot_folder(root: Path, version: int) -> Path:
    """Only a number makes a folder name, so nothing outside the root can be asked for."""
    if not isinstance(version, int) or not 0 <= version < 10**MAX_VERSION_DIGITS:
        raise SnapshotError(f"{version!r} is not a version number")
    return root / f"v{version:0{MAX_VERSION_DIGITS}d}"


def decode_manifest(content: bytes, version: int) -> Manifest:
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except msgspec.MsgspecError as error:
        raise SnapshotError(f"the manifest of weights v{version} is damaged: {error}") from None
    if manifest.version != version:
        raise SnapshotError(f"the folder of weights v{version} holds v{manifest.version}")
    if odd := [name for name in manifest.files if not WEIGHTS_FILES.fullmatch(name)]:
        raise SnapshotError(f"{odd[0]!r} is not a file of weights v{version}")
    check_pieces(manifest)
    return manifest


def check_pieces(manifest: Manifest) -> None:
    """Raises unless every byte of every tensor is in one piece, and in one only."""
    for name, entry in manifest.tensors.items():
        if entry.file not in manifest.files:
            raise SnapshotError(f"{name} of weights v{manifest.version} is in no file")
        end = 0
        for piece in [*entry.pieces, Piece(entry.num_bytes, 0, "")]:
            if piece.offset > end:
                raise SnapshotError(
                    f"{name} of weights v{manifest.version} is not all there: nobody has written bytes {end} to "
                    f"{piece.offset} of {entry.num_bytes}"
                )
            if piece.offset < end:
                raise SnapshotError(
                    f"{name} of weights v{manifest.version}: bytes {piece.offset} to {end} were written twice"
                )
            end = piece.end


def merged_pieces(layout: Manifest, written: Mapping[str, list[Piece]]) -> Manifest:
    """The manifest of what was planned and then written; raises if something is missing or was not planned."""
    if strangers := written.keys() - layout.tensors.keys():
        raise SnapshotError(f"weights v{layout.version} have no tensor {min(strangers)}")
    tensors = {
        name: msgspec.structs.replace(entry, pieces=sorted(written.get(name, []), key=lambda piece: piece.offset))
        for name, entry in layout.tensors.items()
    }
    manifest = msgspec.structs.replace(layout, tensors=tensors)
    check_pieces(manifest)
    return manifest


def read_manifest(root: Path, version: int) -> Manifest:
    try:
        content = (snapshot_folder(root, version) / MANIFEST_FILE).read_bytes()
    except OSError as error:
        raise SnapshotError(f"weights v{version} are not in {root}: {error.strerror}") from None
    return decode_manifest(content, version)


def writing_deadline_s(num_bytes: int) -> float:
    """Seconds within which so much must be on a disk, slow as it may be."""
    return MIN_WRITING_DEADLINE_S + num_bytes / SLOW_DISK_BYTES_PER_S


def loading_deadline_s(given_s: float, num_bytes: int) -> float:
    """Seconds within which an engine must have a version of so many bytes, over a slow network or from a slow disk."""
    return given_s + num_bytes / SLOW_DISK_BYTES_PER_S


def versions_in(root: Path) -> list[int]:
    return sorted(int(entry.name[1:]) for entry in root.glob("v????????") if entry.name[1:].isdigit())


def newest_whole_version(root: Path) -> int:
    """The newest version that is all there by its size, or 0 if there is none; digests are checked by whoever loads it."""
    return next((version for version in reversed(versions_in(root)) if _is_whole(root, version)), 0)


def whole_versions(root: Path) -> list[int]:
    """All that are there by their sizes, the newest last."""
    return [version for version in versions_in(root) if _is_whole(root, version)]


def _is_whole(root: Path, version: int) -> bool:
    try:
        folder, files = snapshot_folder(root, version), read_manifest(root, version).files
        return all((folder / name).stat().st_size == num_bytes for name, num_bytes in files.items())
    except (OSError, SnapshotError):
        return False
