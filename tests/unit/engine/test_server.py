import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import AutoModelForCausalLM

from polyrhythm import messages
from polyrhythm.config import EngineConfig
from polyrhythm.engine.embedded.engine import InferenceEngine
from polyrhythm.engine.server import make_server, run_engine
from polyrhythm.errors import RunError, UserError
from polyrhythm.http.credentials import Credentials
from polyrhythm.setups import setup_of
from polyrhythm.types import Sampling
from polyrhythm.weights.store import WeightStore
from tests.publishing import publish

CREDENTIALS = Credentials({"generate": "generate-secret", "admin": "admin-secret"})
CONFIG = EngineConfig(threads=1, max_batch=16, kv_tokens=16_000)


def generation(version=0, **sampling) -> messages.GenerateRequest:
    return messages.GenerateRequest("r", version, [1, 2, 3], [4, 5], Sampling(**(dict(max_tokens=4) | sampling)))


def me(url: str) -> messages.JoinRequest:
    capabilities = messages.Capabilities(
        max_completions=16, adjustable_threads=True, reads_store=False, openai_routes=True
    )
    return messages.JoinRequest("e0", url, capabilities, messages.Setup("1.2.3", "4.5.6", {}))


class Client:
    """Posts messages to an engine and reads back status and body."""

    def __init__(self, session: aiohttp.ClientSession, url: str, engine: InferenceEngine):
        self.session, self.url, self.engine = session, url, engine

    async def post(self, path: str, message, token: str | None = "admin-secret", content_type=messages.CONTENT_TYPE):
        headers = {"Content-Type": content_type} | ({"Authorization": f"Bearer {token}"} if token else {})
        body = message if isinstance(message, bytes) else messages.encode(message)
        async with self.session.post(self.url + path, data=body, headers=headers) as reply:
            return reply.status, await reply.read()


@pytest.fixture
async def client(model_dir: Path, tmp_path: Path) -> AsyncIterator[Client]:
    store = WeightStore(tmp_path)
    publish(store, AutoModelForCausalLM.from_pretrained(model_dir), 3)
    async with InferenceEngine(model_dir, CONFIG, store=store) as engine:
        server = TestServer(make_server(engine, CREDENTIALS, model_dir, "tiny").app)
        await server.start_server()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
            yield Client(session, str(server.make_url("")).rstrip("/"), engine)
        await server.close()


async def test_a_loaded_version_answers_generation_requests(client: Client):
    status, body = await client.post("/weights/load", messages.LoadRequest(3))
    assert status == 200 and messages.decode(body, messages.EngineStatus).policy_version == 3
    status, body = await client.post("/generate", generation(version=3), token="generate-secret")
    reply = messages.decode(body, messages.GenerateReply)
    assert status == 200 and reply.policy_version == 3
    assert [len(completion.rollout_logprobs) for completion in reply.completions] == [4, 4]


async def test_another_version_than_the_loaded_one_is_a_conflict(client: Client):
    assert (await client.post("/generate", generation(version=3)))[0] == 409
    await client.post("/weights/load", messages.LoadRequest(3))
    status, body = await client.post("/generate", generation(version=2))
    assert (status, body) == (409, b"asked for policy version 2, this engine holds 3")


async def test_loading_a_missing_version_fails_and_leaves_none(client: Client):
    await client.post("/weights/load", messages.LoadRequest(3))
    assert (await client.post("/weights/load", messages.LoadRequest(9)))[0] == 422
    assert (await client.post("/weights/load", messages.LoadRequest(-1)))[0] == 422
    assert client.engine.status().policy_version == -1


async def test_tokens_guard_everything_but_health(client: Client):
    async with client.session.get(client.url + "/health") as reply:
        assert (reply.status, await reply.text()) == (200, "ok")
    async with client.session.get(client.url + "/status") as reply:
        assert reply.status == 401
    for token in (None, "", "wrong", "generate-secre", "Bearer generate-secret", "\u00e9"):
        assert (await client.post("/generate", generation(), token=token))[0] == 401
    assert (await client.post("/weights/load", messages.LoadRequest(3), token="generate-secret"))[0] == 403
    assert (await client.post("/threads", messages.ThreadsRequest(1), token="generate-secret"))[0] == 403
    assert client.engine.status().policy_version == -1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"\xff\xff", 400),
        (messages.encode({"request_id": "r"}), 400),
        (messages.encode({"version": 3, "path": "/etc"}), 400),
        (messages.encode(messages.GenerateRequest("r", 3, [1, 2], [1], Sampling(max_tokens=0))), 400),
        (messages.encode(messages.GenerateRequest("r", 3, [10**9], [1], Sampling(max_tokens=4))), 400),
        (messages.encode(messages.GenerateRequest("r", 3, [1] * 1020, [1], Sampling(max_tokens=5))), 413),
        (messages.encode(messages.GenerateRequest("r", 3, [1], [1] * 17, Sampling(max_tokens=5))), 413),
    ],
)
async def test_malformed_and_impossible_requests_get_one_line_and_harm_nothing(client: Client, body, status):
    await client.post("/weights/load", messages.LoadRequest(3))
    got, text = await client.post("/generate", body)
    assert got == status and len(text) < 200 and b"\n" not in text
    assert (await client.post("/generate", generation(version=3)))[0] == 200


async def test_wrong_content_type_method_path_and_oversized_bodies_are_refused(client: Client, monkeypatch):
    assert (await client.post("/generate", generation(), content_type="application/json"))[0] == 415
    assert (await client.post("/nowhere", b""))[0] == 404
    headers = {"Authorization": "Bearer admin-secret"}
    async with client.session.get(client.url + "/generate", headers=headers) as reply:
        assert (reply.status, reply.headers["Allow"]) == (405, "POST")
    assert (await client.post("/generate", b"0" * (messages.MAX_BODY_BYTES + 1)))[0] == 413


async def until(condition: Callable[[], bool], deadline_s: float = 3.0) -> None:
    for _ in range(int(deadline_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("the condition did not come true in time")


async def test_a_client_that_disconnects_frees_its_rows(client: Client):
    await client.post("/weights/load", messages.LoadRequest(3))
    message = messages.GenerateRequest("r", 3, [1, 2, 3], list(range(16)), Sampling(max_tokens=900))
    abandoned = asyncio.create_task(client.post("/generate", message))
    await until(lambda: client.engine.status().num_running > 0)
    abandoned.cancel()
    await until(lambda: client.engine.status().num_running == 0)
    assert client.engine.status().num_tokens_generated < 16 * 900, "it was dropped, it did not simply finish"


async def test_threads_change_at_run_time(client: Client):
    status, body = await client.post("/threads", messages.ThreadsRequest(2))
    assert status == 200 and messages.decode(body, messages.EngineStatus).num_threads == 2
    assert (await client.post("/threads", messages.ThreadsRequest(0)))[0] == 400


async def serve(model_dir: Path, ready, join_url=None) -> None:
    await run_engine(
        model_dir=model_dir, store=None, name="e0", host="127.0.0.1", port=0, credentials=CREDENTIALS, config=CONFIG,
        join_url=join_url, ready=ready,
    )  # fmt: skip


async def test_an_engine_process_serves_the_folder_joins_the_conductor_and_ends_when_cancelled(model_dir: Path):
    joined: asyncio.Queue[tuple[str, messages.JoinRequest]] = asyncio.Queue()
    num_refused = 0

    async def join(request: web.Request) -> web.Response:
        nonlocal num_refused
        if num_refused < 1:
            num_refused += 1
            return web.Response(status=503)
        await joined.put(
            (request.headers["Authorization"], messages.decode(await request.read(), messages.JoinRequest))
        )
        return web.Response()

    app = web.Application()
    app.router.add_post("/engines/join", join)
    async with TestServer(app) as conductor:
        urls: asyncio.Queue[str] = asyncio.Queue()
        serving = asyncio.create_task(serve(model_dir, urls.put_nowait, str(conductor.make_url("")).rstrip("/")))
        url = await asyncio.wait_for(urls.get(), 30)
        assert await asyncio.wait_for(joined.get(), 10) == (
            "Bearer admin-secret",
            msgspec.structs.replace(me(url), setup=setup_of(model_dir)),
        )
        async with aiohttp.ClientSession() as session:
            headers = {"Authorization": "Bearer generate-secret", "Content-Type": messages.CONTENT_TYPE}
            async with session.post(url + "/generate", data=messages.encode(generation()), headers=headers) as reply:
                assert messages.decode(await reply.read(), messages.GenerateReply).policy_version == 0
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(serving, 10)
        with pytest.raises(aiohttp.ClientConnectionError):
            async with aiohttp.ClientSession() as session, session.get(url + "/health"):
                pass


async def test_a_port_in_use_is_found_before_the_model_is_looked_at(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1 port {port}: .*in use"):
            await run_engine(
                model_dir=tmp_path / "none", store=None, name="e0", host="127.0.0.1", port=port, credentials=CREDENTIALS,
                config=CONFIG, join_url=None, ready=lambda url: None,
            )  # fmt: skip


async def test_an_engine_that_cannot_join_ends_with_the_cause(model_dir: Path, monkeypatch):
    monkeypatch.setattr("polyrhythm.engine.membership.JOIN_DEADLINE_S", 0.3)
    with pytest.raises(RunError, match=r"engine e0 could not join http://127\.0\.0\.1:9"):
        await asyncio.wait_for(serve(model_dir, lambda url: None, "http://127.0.0.1:9"), 20)


async def test_a_process_whose_engine_has_failed_ends(model_dir, monkeypatch):
    def broken(*_):
        raise MemoryError("planted")

    monkeypatch.setattr(InferenceEngine, "_receive", broken)
    urls: list[str] = []
    with pytest.raises(RunError, match="planted"):
        serving = run_engine(
            model_dir=model_dir, store=None, name="engine-0", host="127.0.0.1", port=0, credentials=None, config=CONFIG,
            join_url=None, ready=urls.append,
        )  # fmt: skip
        await asyncio.wait_for(serving, 30)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"{urls[0]}/health")
