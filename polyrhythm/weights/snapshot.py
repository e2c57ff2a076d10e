"""What a snapshot is on disk and on the wire: the names of its files and its manifest. Without torch, for those who only
pass snapshots on."""

from pathlib import Path

import msgspec

from polyrhythm.errors import RunError

WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"
MAX_VERSION_DIGITS = 8
MIN_WRITING_DEADLINE_S = 30.0
SLOW_DISK_BYTES_PER_S = 50e6


class SnapshotError(RunError):
    """A snapshot is missing, incomplete, altered, or does not fit the model."""


class TensorEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    offset: int
    num_bytes: int
    digest: str

    @property
    def is_floating_point(self) -> bool:
        return self.dtype.startswith(("F", "BF"))


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
    tensors: dict[str, TensorEntry]
    probe: Probe | None = None
    """None in what is not for engines, such as a checkpoint."""


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
        num_bytes = (snapshot_folder(root, version) / WEIGHTS_FILE).stat().st_size
        return num_bytes == read_manifest(root, version).num_bytes
    except (OSError, SnapshotError):
        return False
