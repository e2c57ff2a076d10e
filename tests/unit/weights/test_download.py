"""Snapshots over HTTP: what arrives whole and unaltered is used, everything else is refused."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from polyrhythm.http import client
from polyrhythm.weights import snapshot
from polyrhythm.weights.download import DownloadingStore
from polyrhythm.weights.export import whole
from polyrhythm.weights.server import WeightServer
from polyrhythm.weights.snapshot import MANIFEST_FILE, WEIGHTS_FILE, SnapshotError
from polyrhythm.weights.store import WeightStore

TENSORS = {"a": torch.arange(300_000, dtype=torch.float32), "b": torch.ones(3, 5)}


class Source:
    """A published store behind a weight server; `spoil` changes a body on its way."""

    def __init__(self, root: Path):
        self.root = root
        self.store = WeightStore(root / "published")
        self.store.publish((whole(name, tensor) for name, tensor in TENSORS.items()), 7)
        self.spoil: Callable[[str, bytes], bytes] = lambda name, body: body
        self.asked: list[str] = []
        self.tokens: list[str | None] = []
        self.url = ""

    @web.middleware
    async def middleware(self, request: web.Request, handler) -> web.StreamResponse:
        self.asked.append(request.path)
        self.tokens.append(request.headers.get("Authorization"))
        name = request.path.rsplit("/", 1)[-1]
        path = self.store.folder(7) / name
        if request.path.startswith("/weights/7/") and path.is_file():
            content = path.read_bytes()
            if (body := self.spoil(name, content)) != content:
                return web.Response(body=body)
        return await handler(request)

    async def load(self, store: WeightStore) -> dict[str, torch.Tensor]:
        targets = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
        await asyncio.to_thread(store.load_into, targets, 7)
        return targets

    def downloading_store(self, shared_root: Path | None = None) -> DownloadingStore:
        return DownloadingStore(self.root / "local", self.url, "secret", 10.0, shared_root)


@pytest.fixture
async def source(tmp_path) -> AsyncIterator[Source]:
    source = Source(tmp_path)
    app = web.Application(middlewares=[source.middleware])
    app.add_routes(WeightServer(source.store.root, deadline_s=10.0).routes())
    async with TestServer(app) as server:
        source.url = str(server.make_url("")).rstrip("/")
        yield source


async def test_a_version_is_downloaded_verified_and_loaded(source, caplog):
    loaded = await source.load(source.downloading_store())
    assert not caplog.records
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert source.asked == ["/weights/7/manifest.json", "/weights/7/model.safetensors"]
    assert set(source.tokens) == {"Bearer secret"}


async def test_a_version_is_downloaded_once_and_older_ones_make_room(source, tmp_path):
    store = source.downloading_store()
    shutil.copytree(source.store.folder(7), store.folder(6))
    await source.load(store)
    await source.load(store)
    assert len(source.asked) == 2
    assert [path.name for path in store.root.iterdir()] == ["v00000007"]


async def test_a_shared_folder_is_read_and_nothing_is_downloaded(source):
    loaded = await source.load(source.downloading_store(shared_root=source.store.root))
    assert torch.equal(loaded["a"], TENSORS["a"]) and not source.asked


async def test_a_shared_folder_that_is_not_there_is_made_up_for_by_a_download(source, tmp_path):
    await source.load(source.downloading_store(shared_root=tmp_path / "on another machine"))
    assert len(source.asked) == 2


def flip_last_byte(name: str, body: bytes) -> bytes:
    return body if name == MANIFEST_FILE else body[:-1] + bytes([body[-1] ^ 1])


def shorten(name: str, body: bytes) -> bytes:
    return body if name == MANIFEST_FILE else body[:-1]


def lengthen(name: str, body: bytes) -> bytes:
    return body if name == MANIFEST_FILE else body + b"x" * 3_000_000


def other_version(name: str, body: bytes) -> bytes:
    return body if name == WEIGHTS_FILE else json.dumps(json.loads(body) | {"version": 8}).encode()


def damaged_manifest(name: str, body: bytes) -> bytes:
    return body if name == WEIGHTS_FILE else body[: len(body) // 2]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (flip_last_byte, "digests differ"),
        (shorten, "came with"),
        (lengthen, "more than"),
        (other_version, "holds v8"),
        (damaged_manifest, "manifest of weights v7 is damaged"),
    ],
)
async def test_a_spoilt_download_is_refused_leaves_nothing_and_a_good_one_follows(source, spoil, said):
    store = source.downloading_store()
    source.spoil = spoil
    targets = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    with pytest.raises(SnapshotError, match=said):
        await asyncio.to_thread(store.load_into, targets, 7)
    assert not list(store.root.iterdir())
    source.spoil = lambda name, body: body
    assert torch.equal((await source.load(store))["b"], TENSORS["b"])


async def test_a_version_that_is_not_there_and_a_server_that_is_not_there_are_said(source):
    store = source.downloading_store()
    with pytest.raises(SnapshotError, match="the run does not keep that version any more"):
        await asyncio.to_thread(store.load_into, {}, 8)
    with pytest.raises(SnapshotError, match="is not a version number"):
        await asyncio.to_thread(store.load_into, {}, "../7")  # pyright: ignore
    nowhere = DownloadingStore(source.root / "x", "http://127.0.0.1:9", "secret", 10.0)
    with pytest.raises(SnapshotError, match="refused"):
        await asyncio.to_thread(nowhere.load_into, {}, 7)


async def test_a_download_that_takes_too_long_is_given_up(source, monkeypatch):
    monkeypatch.setattr(client, "PIECE_BYTES", 1000)
    store = DownloadingStore(source.root / "local", source.url, "secret", deadline_s=0.0)
    with pytest.raises(SnapshotError, match="did not arrive"):
        await source.load(store)


async def test_a_download_that_drips_is_given_up(tmp_path):
    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(200):
            await response.write(b"x")
            await asyncio.sleep(0.05)
        return response

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", drip)])
    async with TestServer(app) as server:
        store = DownloadingStore(tmp_path, str(server.make_url("")).rstrip("/"), "secret", deadline_s=0.2)
        async with asyncio.timeout(5.0):
            with pytest.raises(SnapshotError, match="did not arrive"):
                await asyncio.to_thread(store.load_into, {}, 7)


async def test_a_version_in_several_files_is_downloaded_and_may_take_longer_the_larger_it_is(source, monkeypatch):
    source.store.file_bytes = 1000
    source.store.publish((whole(name, tensor) for name, tensor in TENSORS.items()), 7)
    given: list[float] = []

    def slowly(given_s: float, num_bytes: int) -> float:
        given.append(num_bytes)
        return given_s + 10.0

    monkeypatch.setattr("polyrhythm.weights.download.loading_deadline_s", slowly)
    loaded = await source.load(source.downloading_store())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    names = ["manifest.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert source.asked == [f"/weights/7/{name}" for name in names]
    assert given == [source.store.manifest(7).num_bytes]


async def test_who_only_compares_downloads_the_manifest_alone(source):
    exported = [whole(name, tensor) for name, tensor in TENSORS.items()]
    await asyncio.to_thread(source.downloading_store().verify, exported, 7)
    assert source.asked == ["/weights/7/manifest.json"]
    with pytest.raises(SnapshotError, match="b of weights v7 is not what was published"):
        await asyncio.to_thread(source.downloading_store().verify, [exported[0], whole("b", torch.zeros(3, 5))], 7)


@pytest.mark.parametrize(
    "path",
    [
        "/weights/7/secret.txt",
        "/weights/7/..%2fsecret.txt",
        "/weights/7/..%2f..%2fsecret.txt",
        "/weights/7/%2e%2e/secret.txt",
        "/weights/..%2f7/manifest.json",
        "/weights/-7/manifest.json",
        "/weights/7x/manifest.json",
        "/weights/٧/manifest.json",
        "/weights/123456789/manifest.json",
        "/weights/8/manifest.json",
        "/weights/7/",
        "/weights/7",
    ],
)
async def test_nothing_but_the_two_files_of_a_version_is_served(source, path):
    for folder in (source.store.folder(7), source.store.root, source.root):
        (folder / "secret.txt").write_text("secret content")
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{source.url}{path}") as reply:
            assert reply.status == 404
            assert "secret content" not in await reply.text()


async def test_a_client_that_reads_too_slowly_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "SLOW_DISK_BYTES_PER_S", 64e9)
    store = WeightStore(tmp_path)
    store.publish([whole("a", torch.zeros(16_000_000))], 7)
    app = web.Application()
    app.add_routes(WeightServer(tmp_path, deadline_s=0.2).routes())
    async with TestServer(app) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port, limit=1000)
        writer.write(b"GET /weights/7/model.safetensors HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.6)
        num_bytes = 0
        async with asyncio.timeout(10):
            try:
                while piece := await reader.read(1 << 20):
                    num_bytes += len(piece)
            except ConnectionResetError:
                pass
        assert num_bytes < 64_000_000
        writer.close()
