import asyncio
import json
import re
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import AutoTokenizer

from polyrhythm.config import EngineConfig
from polyrhythm.engine.embedded.engine import InferenceEngine
from polyrhythm.engine.kinds import NewToken
from polyrhythm.engine.server import make_server
from polyrhythm.http.credentials import Credentials
from polyrhythm.messages import GenerateRequest
from polyrhythm.types import Sampling
from polyrhythm.weights.store import WeightStore

CREDENTIALS = Credentials({"generate": "generate-secret", "admin": "admin-secret"})
CONFIG = EngineConfig(threads=1, max_batch=16, kv_tokens=16_000)
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


class Client:
    """Speaks JSON to an engine that serves the model under the name "tiny"."""

    def __init__(self, session: aiohttp.ClientSession, server: TestServer, engine: InferenceEngine):
        self.session, self.server, self.engine = session, server, engine
        self.url = str(server.make_url("")).rstrip("/")

    @property
    def connections(self) -> list[web.RequestHandler]:
        """Those that the server holds: open, or with a handler that has not ended."""
        assert self.server.runner and self.server.runner.server
        return self.server.runner.server.connections

    async def post(self, path: str, **body) -> tuple[int, dict]:
        async with self.session.post(self.url + path, json=body) as reply:
            return reply.status, await reply.json()

    async def complete(self, **body) -> dict:
        status, reply = await self.post("/v1/completions", **({"prompt": "ab", "max_tokens": 8} | body))
        assert status == 200, reply
        return reply

    async def events(self, path: str, **body) -> list:
        async with self.session.post(self.url + path, json=body | {"stream": True}) as reply:
            assert reply.status == 200 and reply.content_type == "text/event-stream"
            lines = (await reply.text()).split("\n\n")
        assert lines[-1] == "" and all(line.startswith("data: ") for line in lines[:-1])
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines[:-1]]

    async def get(self, path: str, **headers) -> tuple[int, str]:
        async with self.session.get(self.url + path, headers=headers) as reply:
            return reply.status, await reply.text()


@asynccontextmanager
async def connect(model_dir: Path, credentials: Credentials | None = None, store: WeightStore | None = None):
    async with InferenceEngine(model_dir, CONFIG, store=store) as engine:
        server = TestServer(make_server(engine, credentials, model_dir, "tiny").app)
        await server.start_server()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            yield Client(session, server, engine)
        await server.close()


@pytest.fixture
async def client(model_dir: Path) -> AsyncIterator[Client]:
    async with connect(model_dir) as client:
        yield client


@pytest.fixture
async def chat_client(model_dir: Path, tmp_path: Path) -> AsyncIterator[Client]:
    folder = tmp_path / "chat"
    shutil.copytree(model_dir, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    async with connect(folder) as client:
        yield client


@pytest.fixture
async def guarded_client(model_dir: Path) -> AsyncIterator[Client]:
    async with connect(model_dir, CREDENTIALS) as client:
        yield client


async def test_tokens_are_told_as_they_are_drawn_and_add_up_to_the_reply(client: Client):
    told: list[NewToken] = []
    request = GenerateRequest(
        "r", 0, [1, 2, 3], [4, 5, 6], Sampling(max_tokens=12, stop_token_ids=tuple(range(0, 300, 9)))
    )
    reply = await client.engine.generate(request, told.extend)
    for index, completion in enumerate(reply.completions):
        of_one = [token for token in told if token.completion == index]
        assert [token.token_id for token in of_one] == completion.token_ids
        assert [token.logprob for token in of_one] == completion.rollout_logprobs
        assert [token.finish_reason for token in of_one] == [None] * (len(of_one) - 1) + [completion.finish_reason]
    assert len({len(completion.token_ids) for completion in reply.completions}) > 1, "they should end one after another"


async def test_a_streamed_reply_has_the_texts_tokens_and_reasons_of_a_whole_one(client: Client):
    asked = dict(prompt=["ab", "cde"], n=3, seed=3, max_tokens=24, logprobs=0, stop=["\n", "e"])
    whole = await client.complete(**asked)
    events = await client.events("/v1/completions", **asked, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]" and events[-2]["usage"] == whole["usage"] and events[-2]["choices"] == []
    chunks = [event["choices"][0] for event in events[:-2]]
    for choice in whole["choices"]:
        parts = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [value for part in parts for value in part["logprobs"][name]] == choice["logprobs"][name]


async def test_prompts_of_a_request_are_answered_as_if_each_came_alone(client: Client):
    both = await client.complete(prompt=["ab", "cde"], n=2, seed=3)
    alone = [await client.complete(prompt=prompt, n=2, seed=3) for prompt in ("ab", "cde")]
    assert [c["index"] for c in both["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in both["choices"]] == [c["text"] for reply in alone for c in reply["choices"]]
    assert both["usage"] == {"prompt_tokens": 5, "completion_tokens": 32, "total_tokens": 37}


async def test_a_chat_stream_opens_with_the_role_and_adds_up_to_the_message(chat_client: Client):
    asked = dict(messages=[{"role": "user", "content": "hi"}], seed=1, max_tokens=16, logprobs=True)
    status, whole = await chat_client.post("/v1/chat/completions", **asked)
    assert status == 200 and whole["usage"]["prompt_tokens"] == len("[user]hi[assistant]")
    events = await chat_client.events("/v1/chat/completions", **asked)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    choice = whole["choices"][0]
    assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]
    streamed = [entry for event in events[1:-1] for entry in event["choices"][0]["logprobs"]["content"]]
    assert streamed == choice["logprobs"]["content"] and len(streamed) == 16


async def test_chat_without_a_limit_goes_to_the_end_of_the_context(chat_client: Client):
    asked = dict(messages=[{"role": "user", "content": "x" * 980}], seed=1)
    _, reply = await chat_client.post("/v1/chat/completions", **asked)
    assert reply["choices"][0]["finish_reason"] == "length" and reply["usage"]["total_tokens"] == 1024


async def test_a_model_without_a_chat_template_says_so_and_not_where_it_lies(client: Client, model_dir: Path):
    status, reply = await client.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    assert status == 400 and reply["error"]["param"] == "messages"
    assert (
        "'tiny' has no chat template" in reply["error"]["message"] and str(model_dir) not in reply["error"]["message"]
    )


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"model": "gpt"}, 404, "model", "model_not_found"),
        ({"prompt": ""}, 400, "prompt", None),
        ({"prompt": []}, 400, "prompt", None),
        ({"prompt": [10**6]}, 400, None, None),
        ({"temperature": -1}, 400, "temperature", None),
        ({"max_tokens": 1023}, 400, "max_tokens", "context_length_exceeded"),
        ({"top_k": 2**63}, 400, "top_k", None),
        ({"n": 17}, 400, None, None),
        ({"n": 16, "max_tokens": 1022}, 400, None, None),
        ({"prompt": ["a"] * 2000, "n": 2}, 400, "prompt", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_have_the_shape_of_openai_streamed_or_not(client: Client, body, status, param, code, stream):
    got, reply = await client.post("/v1/completions", **({"prompt": "ab", "stream": stream} | body))
    assert (got, reply["error"]["param"], reply["error"]["code"]) == (status, param, code)
    assert reply["error"]["type"] == "invalid_request_error" and reply["error"]["message"]


@pytest.mark.parametrize("body", [b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 100_000, b"", b"{"])
async def test_a_body_that_is_no_json_is_refused(client: Client, body: bytes):
    headers = {"Content-Type": "application/json"}
    async with client.session.post(f"{client.url}/v1/completions", data=body, headers=headers) as reply:
        assert reply.status == 400 and "not JSON" in (await reply.json())["error"]["message"]


async def test_a_token_that_is_no_text_is_a_wrong_token(guarded_client: Client):
    address = urlsplit(guarded_client.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n")
    assert b" 401 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()


async def test_text_ends_at_the_tokenizer_s_own_end_token(model_dir: Path, tmp_path: Path):
    """Which may be another than the model's: a completion that a run would end is not continued here."""
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "z"
    tokenizer.save_pretrained(folder)
    end_id = tokenizer.eos_token_id
    assert end_id != json.loads((folder / "config.json").read_text())["eos_token_id"]
    async with connect(folder) as client:
        asked: list[GenerateRequest] = []
        generate = client.engine.generate

        async def recording(request: GenerateRequest, *rest):
            asked.append(request)
            return await generate(request, *rest)

        client.engine.generate = recording
        await client.complete()
    assert end_id in asked[0].sampling.stop_token_ids


async def test_the_routes_need_the_token_of_generation_and_say_so_in_json(guarded_client: Client):
    for path in ("/v1/models", "/v1/models/tiny", "/metrics"):
        assert (await guarded_client.get(path))[0] == 401
        assert (await guarded_client.get(path, Authorization="Bearer wrong"))[0] == 401
        assert (await guarded_client.get(path, Authorization="Bearer generate-secret"))[0] == 200
    status, reply = await guarded_client.post("/v1/completions", prompt="a")
    assert status == 401 and reply["error"]["type"] == "authentication_error"
    assert (await guarded_client.post("/v1/chat/completions", messages=[]))[0] == 401


async def test_without_tokens_anybody_may_generate_and_nobody_administrate(client: Client):
    assert (await client.get("/v1/models"))[0] == 200
    for path in ("/weights/load", "/threads"):
        async with client.session.post(client.url + path, headers={"Authorization": "Bearer "}) as reply:
            assert reply.status == 401


async def test_other_content_types_are_refused(client: Client):
    async with client.session.post(client.url + "/v1/completions", data=b'{"prompt": "a"}') as reply:
        assert reply.status == 415 and (await reply.json())["error"]["message"] == "send application/json"


async def test_without_weights_the_engine_is_unavailable(model_dir: Path, tmp_path: Path):
    async with connect(model_dir, store=WeightStore(tmp_path)) as client:
        assert (await client.post("/v1/completions", prompt="a"))[0] == 503


async def until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    for _ in range(int(deadline_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("the condition did not come true in time")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_frees_its_rows(client: Client, stream):
    body = {"prompt": ["ab", "cd"], "n": 8, "max_tokens": 900, "stream": stream}
    abandoned = asyncio.create_task(client.session.post(client.url + "/v1/completions", json=body))
    await until(lambda: client.engine.status().num_kv_tokens_used == 2 * (2 + 8 * 900))
    if stream:
        (await abandoned).close()
    else:
        abandoned.cancel()
    await until(lambda: client.engine.status().num_running == 0 and client.engine.status().num_kv_tokens_used == 0)
    assert client.engine.status().num_tokens_generated < 2 * 8 * 900


async def test_an_engine_that_fails_within_a_stream_ends_it_with_an_error(client: Client, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of luck")

    async with client.session.post(
        client.url + "/v1/completions", json={"prompt": "ab", "max_tokens": 1000, "stream": True}
    ) as reply:
        await reply.content.readline()
        monkeypatch.setattr(client.engine._runner, "decode", fail)
        last = (await reply.text()).strip().split("\n\n")[-1]
    assert "out of luck" in json.loads(last.removeprefix("data: "))["error"]["message"]


@asynccontextmanager
async def deaf_stream(client: Client, **body) -> AsyncIterator[asyncio.Transport]:
    """A stream of which its client reads nothing: the server's end of it, with the smallest buffers."""
    address, content = urlsplit(client.url), json.dumps(body | {"stream": True})
    head = f"POST {address.path}/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        deaf.connect((address.hostname, address.port))
        await until(lambda: bool(client.connections))
        transport = client.connections[0].transport
        assert isinstance(transport, asyncio.Transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        transport.set_write_buffer_limits(0)
        deaf.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
        yield transport


@pytest.mark.parametrize(
    ("deadline_s", "asked"),
    [(1.0, dict(n=16, max_tokens=900)), (60.0, dict(n=2, max_tokens=64))],
    ids=["within the stream", "at its end"],
)
async def test_a_client_that_does_not_read_is_not_waited_for_beyond_the_deadline(
    client: Client, monkeypatch, caplog, deadline_s, asked
):
    monkeypatch.setattr("polyrhythm.engine.openai.api._REQUEST_DEADLINE_S", deadline_s)
    monkeypatch.setattr("polyrhythm.engine.openai.api._LAST_WORD_DEADLINE_S", 0.2)
    async with deaf_stream(client, prompt="ab", seed=1, logprobs=0, **asked) as transport:
        await until(lambda: transport.get_write_buffer_size() > 0)
        await until(lambda: not client.connections)
        await until(lambda: client.engine.status().num_running == client.engine.status().num_kv_tokens_used == 0)
    assert not caplog.records, "nothing failed: a client has gone"


async def test_metrics_are_what_prometheus_reads(client: Client):
    await client.complete(n=2, max_tokens=5, prompt="xy")
    await client.post("/v1/completions", prompt="")
    status, text = await client.get("/metrics")
    assert status == 200
    samples = {}
    for line in text.splitlines():
        if not line.startswith("# "):
            found = re.fullmatch(r'([a-z_]+)(?:\{([a-z]+="[^"]*"(?:,[a-z]+="[^"]*")*)\})? (\S+)', line)
            assert found, line
            samples[found[1].removeprefix("polyrhythm_engine_"), found[2]] = float(found[3])
    route = 'route="/v1/completions"'
    assert samples["requests_total", f'{route},status="200"'] == samples["requests_total", f'{route},status="400"'] == 1
    buckets = [value for (name, _), value in samples.items() if name == "request_seconds_bucket"]
    assert buckets == sorted(buckets) and buckets[-1] == samples["request_seconds_count", route] == 2
    assert samples["request_seconds_sum", route] > 0
    assert samples["generated_tokens_total", None] == 10 and samples["policy_version", None] == 0
    assert samples["kv_cache_tokens", None] == 16_000 and samples["kv_cache_tokens_used", None] == 0
    assert samples["completions_running", None] == samples["completions_waiting", None] == 0
    assert samples["busy_seconds_total", None] > 0
    for name in {name for name, _ in samples}:
        family = re.sub("_(bucket|sum|count)$", "", name) if name.startswith("request_seconds") else name
        assert f"# TYPE polyrhythm_engine_{family} " in text
