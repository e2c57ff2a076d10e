"""Weights for an engine on another machine: from the run's folder if it can be read here, else over HTTP."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyrhythm.http.client import BlockingClient
from polyrhythm.http.errors import CallFailed, DeadlinePassed, ErrorReply
from polyrhythm.weights.snapshot import (
    MANIFEST_FILE,
    Manifest,
    SnapshotError,
    decode_manifest,
    loading_deadline_s,
    read_manifest,
    snapshot_folder,
)
from polyrhythm.weights.store import WeightStore

GONE = 404
MAX_MANIFEST_BYTES = 64 * 2**20


class DownloadingStore(WeightStore):
    """A store in a folder of this machine that gets the version it is asked for from the run's weight server.

    What arrives is verified by the ordinary load: sizes and digests of the manifest, then names, shapes and types.
    """

    def __init__(self, root: Path, url: str, credential: str, deadline_s: float, shared_root: Path | None = None):
        super().__init__(root)
        self._url = url
        self._credential = credential
        self._deadline_s = deadline_s
        self._shared_root = shared_root

    def local_folder(self, version: int) -> Path:
        shared_root = self._shared_root
        if shared_root is not None and os.access(snapshot_folder(shared_root, version) / MANIFEST_FILE, os.R_OK):
            return snapshot_folder(shared_root, version)
        if not self.folder(version).exists():
            self._make_room()
            download_snapshot(self._url, self._credential, version, self.root, self._deadline_s)
        return self.folder(version)

    def manifest(self, version: int) -> Manifest:
        """Alone, if nothing else of the version is here: who only compares needs no more."""
        for root in (self._shared_root, self.root):
            if root is not None and os.access(snapshot_folder(root, version) / MANIFEST_FILE, os.R_OK):
                return read_manifest(root, version)
        with tempfile.TemporaryDirectory() as folder, _downloading(self._url, version):
            client = BlockingClient(self._url, self._credential, peer=f"the conductor at {self._url}")
            until_s = time.monotonic() + self._deadline_s
            return _fetch_manifest(client, version, Path(folder), until_s)

    def refuse(self, version: int) -> None:
        """The next attempt downloads it again."""
        shutil.rmtree(self.folder(version), ignore_errors=True)

    def _make_room(self) -> None:
        for version in self.versions():
            shutil.rmtree(self.folder(version), ignore_errors=True)


def download_snapshot(url: str, credential: str, version: int, root: Path, deadline_s: float) -> Path:
    """Get a version from a weight server; its folder appears by one rename when all bytes are there.

    It may take so many seconds, and more by the bytes that it has.
    """
    target = snapshot_folder(root, version)
    incoming = root / f".incoming-{target.name}"
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True)
    until_s = time.monotonic() + deadline_s
    client = BlockingClient(url, credential, peer=f"the conductor at {url}")
    try:
        with _downloading(url, version):
            manifest = _fetch_manifest(client, version, incoming, until_s)
            until_s = loading_deadline_s(until_s, manifest.num_bytes)
            for name, expected in manifest.files.items():
                num_bytes = _fetch(client, version, incoming / name, expected, until_s)
                if num_bytes != expected:
                    raise SnapshotError(f"{name} of weights v{version} came with {num_bytes} of {expected} bytes")
            os.rename(incoming, target)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return target


@contextmanager
def _downloading(url: str, version: int) -> Iterator[None]:
    """What goes wrong inside is a SnapshotError that says where."""
    try:
        yield
    except DeadlinePassed:
        raise SnapshotError(f"weights v{version} did not arrive from {url} in time") from None
    except (OSError, CallFailed) as error:
        said = f"status {error.status}" if isinstance(error, ErrorReply) else str(error)
        if isinstance(error, ErrorReply) and error.status == GONE:
            said = "the run does not keep that version any more (weights.keep)"
        raise SnapshotError(f"weights v{version} could not be downloaded from {url}: {said}") from None


def _fetch_manifest(client: BlockingClient, version: int, folder: Path, until_s: float) -> Manifest:
    _fetch(client, version, folder / MANIFEST_FILE, MAX_MANIFEST_BYTES, until_s)
    return decode_manifest((folder / MANIFEST_FILE).read_bytes(), version)


def _fetch(client: BlockingClient, version: int, path: Path, max_bytes: int, until_s: float) -> int:
    """Write one file of a version and return its size; more bytes than it may have are not taken."""
    left_s = until_s - time.monotonic()
    with open(path, "wb") as file:
        for piece in client.stream(f"/weights/{version}/{path.name}", max_bytes=max_bytes, deadline_s=left_s):
            file.write(piece)
        return file.tell()
