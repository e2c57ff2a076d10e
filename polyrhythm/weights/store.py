"""Versioned weight snapshots: published whole, verified before they are used.

A version is a folder `v00000012` holding `model.safetensors` and `manifest.json` with a BLAKE3 digest per tensor. It is
written under another name and appears by one rename, so a reader sees all of it or nothing. Folders of versions that are
no longer kept become the space for the next one: on Linux a page that exists already is ten times cheaper to write than
a new one (1.4 s against 0.15 s for half a gigabyte in shared memory).
"""

import errno
import io
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import blake3
import msgspec
import torch

from polyrhythm.errors import RunError
from polyrhythm.weights.export import Rows
from polyrhythm.weights.snapshot import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    Manifest,
    Probe,
    SnapshotError,
    TensorEntry,
    read_manifest,
    snapshot_folder,
    versions_in,
)

NUM_READERS = 2
_PIECE_BYTES = 1 << 19
_STAGING = ".staging"
_DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64",
                torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
                torch.bool: "BOOL"}  # fmt: skip


def can_be_stored(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _DTYPE_NAMES and tensor.layout is torch.strided


def space_for(entry: TensorEntry) -> torch.Tensor:
    """An empty tensor into which that of a manifest can be read."""
    return torch.empty(entry.shape, dtype={name: dtype for dtype, name in _DTYPE_NAMES.items()}[entry.dtype])


class WeightStore:
    """The snapshots under one root folder; any number of readers, one writer."""

    def __init__(self, root: Path, keep: int = 2):
        self.root = Path(root)
        self.keep = keep

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
        tensors = _whole_tensors(exported)
        self.root.mkdir(parents=True, exist_ok=True)
        target = self.folder(version)
        staging = self._staging_folder()
        try:
            manifest = _write_snapshot(tensors, version, staging / WEIGHTS_FILE)
            manifest = msgspec.structs.replace(manifest, probe=probe)
            _write_file(staging / MANIFEST_FILE, msgspec.json.encode(manifest))
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            is_full = error.errno == errno.ENOSPC
            hint = ": make room (weights go to weights.root, checkpoints to output_dir)" if is_full else ""
            raise RunError(f"publishing weights v{version} in {self.root} failed: {error.strerror}{hint}") from error
        if target.exists():  # a step that is run again after a crash publishes its version again
            shutil.rmtree(target)  # only now: what was there stays until the new one is complete
        os.rename(staging, target)
        _sync_folder(self.root)
        self._retire(version)
        return target

    def load_into(self, targets: Mapping[str, torch.Tensor], version: int) -> Manifest:
        """Read `version` into these tensors in place; raises unless every digest of what has arrived is right.

        After a failure they hold nothing that may be used.
        """
        manifest = read_manifest(self.root, version)
        _check_fit(manifest, targets)
        with _open_snapshot(self.folder(version) / WEIGHTS_FILE, manifest) as file:
            _read_all(file.fileno(), manifest, targets)
        return manifest

    def load_part_into(self, targets: Mapping[str, torch.Tensor], version: int) -> None:
        """As `load_into`, but only these tensors of those that the version has."""
        manifest = read_manifest(self.root, version)
        there = {name: entry for name, entry in manifest.tensors.items() if name in targets}
        part = msgspec.structs.replace(manifest, tensors=there)
        _check_fit(part, targets)
        with _open_snapshot(self.folder(version) / WEIGHTS_FILE, manifest) as file:
            _read_all(file.fileno(), part, targets)

    def verify(self, exported: Iterable[Rows], version: int) -> None:
        """Raises unless what is exported is what was published as `version`, to the last bit."""
        manifest, tensors = read_manifest(self.root, version), _whole_tensors(exported)
        _check_fit(manifest, tensors)
        with ThreadPoolExecutor(NUM_READERS) as readers:
            digests = readers.map(lambda tensor: _digest(_bytes_of(tensor)), tensors.values())
            _refuse_wrong(manifest, dict(zip(tensors, digests, strict=True)))

    def _staging_folder(self) -> Path:
        staging = self.root / _STAGING
        staging.mkdir(exist_ok=True)
        (staging / MANIFEST_FILE).unlink(missing_ok=True)
        return staging

    def _retire(self, newest: int) -> None:
        """Keep the newest versions; one older folder becomes the staging space of the next, the rest go."""
        kept = [version for version in self.versions() if version <= newest][-self.keep :]
        for version in self.versions():
            if version not in kept:
                folder, staging = self.folder(version), self.root / _STAGING
                if staging.exists():
                    shutil.rmtree(folder)
                else:
                    os.rename(folder, staging)


def _whole_tensors(exported: Iterable[Rows]) -> dict[str, torch.Tensor]:
    tensors = {}
    for rows in exported:
        # Several processes that write their own rows into one file is what this will become; half a tensor is nothing.
        if not rows.is_whole:
            raise ValueError(f"{rows.name}: {len(rows.rows)} of {rows.shape[0]} rows are not a whole tensor")
        tensors[rows.name] = rows.rows
    return tensors


def _write_snapshot(tensors: Mapping[str, torch.Tensor], version: int, path: Path) -> Manifest:
    header, offsets = _safetensors_header(tensors)
    entries: dict[str, TensorEntry] = {}
    # BLAKE3 and write() both release the interpreter, so the digests cost little beside the copy.
    with ThreadPoolExecutor(1) as digester, open(path, "r+b" if path.exists() else "wb", buffering=0) as file:
        file.write(header)
        digests = {}
        for name, tensor in tensors.items():
            content = _bytes_of(tensor)
            digests[name] = digester.submit(_digest, content)
            _write_all(file, content)
        file.truncate()
        os.fsync(file.fileno())
        for name, tensor in tensors.items():
            entries[name] = TensorEntry(
                dtype=_DTYPE_NAMES[tensor.dtype], shape=list(tensor.shape), offset=offsets[name],
                num_bytes=tensor.nbytes, digest=digests[name].result(),
            )  # fmt: skip
        return Manifest(version=version, num_bytes=file.tell(), tensors=entries)


def _safetensors_header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """The safetensors header, written here because the library would copy every tensor twice."""
    table, position = {}, 0
    for name, tensor in tensors.items():
        table[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape),
                       "data_offsets": [position, position + tensor.nbytes]}  # fmt: skip
        position += tensor.nbytes
    text = json.dumps(table).encode()
    text += b" " * (-(8 + len(text)) % 64)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + table[name]["data_offsets"][0] for name in tensors}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())  # pyright: ignore


def _write_all(file, content: memoryview) -> None:
    while content:  # write() takes at most 2 GiB at a time
        content = content[file.write(content) :]


def _digest(content: memoryview) -> str:
    return blake3.blake3(content).hexdigest()


def _open_snapshot(path: Path, manifest: Manifest) -> io.FileIO:
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise SnapshotError(f"cannot open {path}: {error.strerror}") from None
    size = os.fstat(file.fileno()).st_size
    if size != manifest.num_bytes:
        file.close()
        raise SnapshotError(f"{path} has {size} bytes instead of {manifest.num_bytes}: the snapshot is torn")
    return file


def _check_fit(manifest: Manifest, targets: Mapping[str, torch.Tensor]) -> None:
    if manifest.tensors.keys() != targets.keys():
        odd = sorted(manifest.tensors.keys() ^ targets.keys())
        raise SnapshotError(f"weights v{manifest.version} are of another model: they differ in {', '.join(odd[:3])}")
    for name, entry in manifest.tensors.items():
        target = targets[name]
        if entry.shape != list(target.shape) or entry.dtype != _DTYPE_NAMES[target.dtype]:
            raise SnapshotError(f"{name} is {entry.dtype}{entry.shape} in weights v{manifest.version}, "
                                f"the model has {_DTYPE_NAMES[target.dtype]}{list(target.shape)}")  # fmt: skip
        if entry.num_bytes != target.nbytes or entry.offset < 0:
            raise SnapshotError(f"{name} has {entry.num_bytes} bytes at {entry.offset} in weights v{manifest.version}")


def _read_all(descriptor: int, manifest: Manifest, targets: Mapping[str, torch.Tensor]) -> None:
    with ThreadPoolExecutor(NUM_READERS) as readers:
        digests = readers.map(
            lambda name: _read_tensor(descriptor, manifest.tensors[name], targets[name]), targets
        )  # fmt: skip
        _refuse_wrong(manifest, dict(zip(targets, digests, strict=True)))


def _refuse_wrong(manifest: Manifest, digests: Mapping[str, str]) -> None:
    wrong = [name for name, digest in digests.items() if digest != manifest.tensors[name].digest]
    if wrong:
        raise SnapshotError(f"{wrong[0]} of weights v{manifest.version} is not what was published: digests differ")


def _read_tensor(descriptor: int, entry: TensorEntry, target: torch.Tensor) -> str:
    """Read one tensor and tell its digest. Both take a piece at a time, while it is in the cache, and let other threads run."""
    is_in_place = target.device.type == "cpu" and target.is_contiguous()
    content = _bytes_of(target) if is_in_place else memoryview(bytearray(entry.num_bytes))
    digest = blake3.blake3()
    for start in range(0, entry.num_bytes, _PIECE_BYTES):
        piece = content[start : start + _PIECE_BYTES]
        _read_piece(descriptor, piece, entry.offset + start)
        digest.update(piece)
    if not is_in_place:
        target.copy_(torch.frombuffer(content, dtype=target.dtype).reshape(target.shape))
    return digest.hexdigest()


def _read_piece(descriptor: int, piece: memoryview, offset: int) -> None:
    while piece:
        num_bytes = os.preadv(descriptor, [piece], offset)
        if not num_bytes:
            raise SnapshotError("the snapshot has become shorter while it was read: it is torn")
        piece, offset = piece[num_bytes:], offset + num_bytes


def _write_file(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
