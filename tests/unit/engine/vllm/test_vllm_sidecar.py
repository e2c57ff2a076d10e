"""The sidecar before a scripted vLLM: what it asks for, what it believes, and what it does when vLLM lies or breaks."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polyrhythm.config import EngineConfig
from polyrhythm.engine.kinds import Invitation
from polyrhythm.engine.refusals import EngineFailed, Reloading, WrongVersion
from polyrhythm.engine.vllm.engine import MAX_CANARIES, VllmEngine, open_vllm
from polyrhythm.engine.vllm.launching import NEEDED_ROUTES
from polyrhythm.engine.vllm.worker.polyrhythm_worker import PROTOCOL
from polyrhythm.errors import UserError
from polyrhythm.messages import GenerateRequest, Meeting
from polyrhythm.types import Sampling
from polyrhythm.weights.proof import NUM_SEQUENCES, ProofFailed
from polyrhythm.weights.snapshot import read_manifest
from polyrhythm.weights.store import SnapshotError, WeightStore
from tests.conftest import build_tiny_model
from tests.publishing import publish
from tests.tiny_model import byte_tokenizer

DEADLINE_S = 30.0
INVITATION = Invitation("http://conductor", "secret", Meeting(4, 1, 1, 2, 5.0))


class ScriptedVllm:
    """Answers as vLLM 0.32 does; it computes what the probe says, unless it is told to be stale."""

    def __init__(self, root: Path):
        self.root = root
        self.calls: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.label, self.is_stale, self.num_resets_refused = "default", False, 0
        self.number_format, self.version = "float32", "0.32.0"
        self.routes = list(NEEDED_ROUTES)
        self.rpc: dict[str, Any] = {"results": [{"repacked": "lm_head"}]}
        self.rpc_status = 200
        self.choice: dict[str, Any] = {}
        self.folders: list[str] = []
        self.trouble_with_received: dict[str, str] = {}

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{tail:.*}", self.get)
        app.router.add_post("/{tail:.*}", self.post)
        return app

    async def get(self, request: web.Request) -> web.Response:
        if request.path == "/openapi.json":
            return web.json_response({"paths": {route: {} for route in self.routes}})
        if request.path == "/metrics":
            return web.Response(text='vllm:generation_tokens_total{engine="0",model_name="m"} 11.0\n')
        return web.json_response({"version": self.version})

    async def post(self, request: web.Request) -> web.Response:
        body = json.loads(await request.text() or "{}")
        self.calls.append(body.get("method") or request.path_qs)
        if request.path == "/collective_rpc":
            if body["method"] == "polyrhythm_hello":
                return web.json_response({"results": [{"protocol": PROTOCOL, "number_format": self.number_format}]})
            if body["method"] == "polyrhythm_receive" or body["kwargs"]["folder"] == "":
                self.folders += [""] * (body["method"] == "polyrhythm_load")
                is_receiving = "missed" in self.trouble_with_received
                trouble = self.trouble_with_received if is_receiving == (body["method"] == "polyrhythm_receive") else {}
                return web.json_response({"results": [trouble]})
            self.folders.append(body["kwargs"]["folder"])
            return web.json_response(self.rpc, status=self.rpc_status)
        if request.path == "/update_weight_version":
            self.label = body["new_version"]
        if request.path == "/reset_prefix_cache":
            self.num_resets_refused -= 1
            return web.json_response({"success": self.num_resets_refused < 0})
        if request.path == "/inference/v1/generate":
            self.asked.append(body)
            return web.json_response(self.generate(body))
        return web.json_response({})

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        if "prompt_logprobs" in body["sampling_params"]:
            return {"prompt_logprobs": self.probed(body["token_ids"])}
        token_ids = [7, 8, body["sampling_params"]["seed"]]
        choice = {
            "token_ids": token_ids, "finish_reason": "length",
            "weight_versions": [{"version": self.label, "start": 0, "end": 3}],
            "logprobs": {"content": [{"token_id": token, "logprob": -1.5} for token in token_ids]},
        }  # fmt: skip
        return {"choices": [choice | self.choice]}

    def probed(self, sequence: list[int]) -> list[dict[str, Any] | None]:
        probe = read_manifest(self.root, int(self.label.split()[-1])).probe
        assert probe is not None
        is_canary = self.label.startswith("canary") and not self.is_stale
        logprobs = probe.canary_logprobs if is_canary else probe.logprobs
        first = probe.sequences.index(sequence) * (len(sequence) - 1)
        values = zip(sequence[1:], logprobs[first:], strict=False)
        return [None, *({str(token): {"logprob": logprob}} for token, logprob in values)]


@pytest.fixture
def vllm(tmp_path: Path) -> ScriptedVllm:
    store = WeightStore(tmp_path / "weights", keep=3)
    for version in (3, 4):
        publish(store, build_tiny_model("llama", seed=version), version)
    return ScriptedVllm(store.root)


@pytest.fixture
async def opened(vllm: ScriptedVllm, tmp_path: Path):
    """Opens the sidecar beside the scripted server."""
    model_dir = tmp_path / "model"
    build_tiny_model("llama").save_pretrained(model_dir)
    byte_tokenizer().save_pretrained(model_dir)
    server = TestServer(vllm.app())
    await server.start_server()
    config = EngineConfig(kind="vllm", max_batch=4, url=str(server.make_url("")))
    yield lambda: open_vllm(model_dir, config, WeightStore(vllm.root))
    await server.close()


@pytest.fixture
async def engine(opened) -> AsyncIterator[VllmEngine]:
    async with opened() as engine:
        yield engine


def asking(version: int = 3, seeds=(1, 2**63 - 1), **sampling) -> GenerateRequest:
    return GenerateRequest("r", version, [5, 6], list(seeds), Sampling(**({"max_tokens": 3} | sampling)))


async def test_each_completion_is_a_request_of_its_own_with_its_seed_salted_by_the_load(engine, vllm):
    salts = []
    for version in (3, 4):
        await engine.load(version)
        vllm.asked.clear()
        reply = await engine.generate(asking(version, temperature=0.7, stop=("x",), stop_token_ids=(9,)))
        assert [completion.token_ids[-1] for completion in reply.completions] == [1, 2**63 - 1]
        assert [body["sampling_params"]["seed"] for body in vllm.asked] == [1, 2**63 - 1]
        salts.append({body["cache_salt"] for body in vllm.asked})
        sampling = vllm.asked[0]["sampling_params"]
        assert sampling["temperature"] == 0.7 and sampling["logprobs"] == 0 and sampling["stop"] == ["x"]
        assert set(sampling["stop_token_ids"]) == {9, 0, 2}, "the request's, the tokenizer's and the model's"
    assert len(salts[0]) == len(salts[1]) == 1 and not salts[0] & salts[1]
    assert not set("".join(salts[0])) & set("/@\\\0"), "vLLM refuses such salts"


async def test_the_first_load_shows_the_canary_and_later_ones_do_not(engine, vllm):
    vllm.calls.clear()
    await engine.load(3)
    once = ["/pause?mode=abort", "polyrhythm_load", "/update_weight_version", "/reset_prefix_cache", "/resume"]
    probing = ["/inference/v1/generate"] * NUM_SEQUENCES
    assert vllm.calls == [*once, *probing, *once, *probing]
    vllm.calls.clear()
    await engine.load(4)
    assert vllm.calls == [*once, *probing] and vllm.label == "4"


async def test_a_server_that_computes_old_weights_is_refused_by_its_canary(engine, vllm):
    vllm.is_stale = True
    with pytest.raises(ProofFailed, match="the canary of weights v3 are loaded but not what is computed"):
        await engine.load(3)
    assert engine.status().policy_version == -1 and engine.is_alive
    with pytest.raises(WrongVersion):
        await engine.generate(asking())
    vllm.is_stale = False
    await engine.load(3)
    assert engine.status().policy_version == 3


async def test_a_server_that_never_shows_its_canary_is_given_up_with_one_line(engine, vllm):
    vllm.is_stale = True
    for _ in range(MAX_CANARIES):
        assert engine.is_alive
        with pytest.raises(ProofFailed):
            await engine.load(3)
    with pytest.raises(
        UserError, match=r"does not compute with what it has loaded, in 3 of 3 proofs: .*apart.* Use another"
    ):
        await asyncio.wait_for(engine.failure(), DEADLINE_S)
    with pytest.raises(EngineFailed):
        await engine.load(3)


async def test_who_is_invited_loads_what_it_receives_and_reads_nothing(engine, vllm):
    await engine.load(3)
    assert not engine.status().has_received and engine.capabilities.num_receivers == 1
    vllm.calls.clear()
    await engine.load(4, INVITATION)
    loading = ["/pause?mode=abort", "polyrhythm_load", "/update_weight_version", "/reset_prefix_cache", "/resume"]
    probing = ["/inference/v1/generate"] * NUM_SEQUENCES
    assert vllm.calls == ["/pause?mode=abort", "polyrhythm_receive", *loading, *probing]
    assert engine.status().policy_version == 4 and engine.status().has_received
    assert vllm.folders == [str(vllm.root / "v00000003")] * 2 + [""]


@pytest.mark.parametrize("trouble", ["missed", "refused"])
async def test_who_misses_a_broadcast_or_receives_something_else_reads_the_store(engine, vllm, trouble, caplog):
    await engine.load(3)
    vllm.trouble_with_received = {trouble: "the sender has gone"}
    await engine.load(4, INVITATION)
    assert engine.status().policy_version == 4 and not engine.status().has_received
    assert vllm.folders[-1] == str(vllm.root / "v00000004") and "the sender has gone" in caplog.text


async def test_an_engine_that_has_not_shown_its_canary_reads_the_store(engine, vllm):
    await engine.load(3, INVITATION)
    assert "polyrhythm_receive" not in vllm.calls and not engine.status().has_received


async def test_a_prefix_cache_that_is_still_held_is_reset_later(engine, vllm):
    vllm.num_resets_refused = 2
    await engine.load(3)
    assert vllm.calls.count("/reset_prefix_cache") == 4


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "2", "start": 0, "end": 3}],
        [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 3}],
        [{"version": "3", "start": 0, "end": 2}],
        [],
    ],
)
async def test_tokens_that_not_only_this_version_has_drawn_are_refused(engine, vllm, spans):
    await engine.load(3)
    vllm.choice = {"weight_versions": spans}
    with pytest.raises(WrongVersion, match="not all tokens were drawn by version 3"):
        await engine.generate(asking())


async def test_a_completion_that_a_load_has_cut_off_is_asked_for_again(engine, vllm):
    await engine.load(3)
    vllm.choice = {"finish_reason": "abort"}
    with pytest.raises(Reloading):
        await engine.generate(asking())


async def test_what_the_worker_refuses_leaves_the_server_alive_and_without_a_version(engine, vllm):
    await engine.load(3)
    vllm.rpc = {"results": [{"repacked": ""}, {"refused": "lm_head is not what was published: digests differ"}]}
    with pytest.raises(SnapshotError, match="digests differ"):
        await engine.load(4)
    assert engine.status().policy_version == -1 and engine.is_alive


async def test_a_load_that_breaks_half_way_ends_the_engine(engine, vllm):
    vllm.rpc_status = 500
    with pytest.raises(EngineFailed):
        await engine.load(3)
    assert not engine.is_alive
    async with asyncio.timeout(DEADLINE_S):
        assert "a load of version 3 failed half-way" in await engine.failure()


async def test_progress_is_what_the_server_counts(engine):
    async with asyncio.timeout(DEADLINE_S):
        while engine.status().num_tokens_generated == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert engine.status().num_tokens_generated == 11


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "0.31.9"}, "has vLLM 0.31.9: it must be 0.32 or newer"),
        ({"routes": ["/health"]}, "has no route /collective_rpc, "),
        ({"number_format": "float8"}, "computes in float8"),
    ],
)
async def test_a_server_that_cannot_be_used_is_refused_by_name(opened, vllm, change, said):
    for name, value in change.items():
        setattr(vllm, name, value)
    with pytest.raises(UserError, match=said):
        async with opened():
            pass
