"""What every kind of engine promises, asked through the server that all of them share. A new kind joins `CORES`."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest

from polyrhythm.conductor.engines.client import EngineError, HttpEngineClient
from polyrhythm.config import EngineConfig
from polyrhythm.engine.kinds import ENGINE_KINDS, NO_VERSION, EngineCore
from polyrhythm.engine.refusals import EngineFailed, Refused, Reloading, TooLarge, WrongVersion
from polyrhythm.engine.server import make_server
from polyrhythm.http.async_client import open_session
from polyrhythm.http.credentials import Credentials
from polyrhythm.http.listener import Listener
from polyrhythm.messages import Capabilities, EngineStatus, GenerateReply, GenerateRequest
from polyrhythm.types import Completion, Sampling
from polyrhythm.weights.export import named_weights
from polyrhythm.weights.proof import check_proof, negate_for_canary, required_probe
from polyrhythm.weights.snapshot import MANIFEST_FILE, read_manifest
from polyrhythm.weights.store import WeightStore
from tests.conftest import VOCABULARY, build_tiny_model
from tests.publishing import own_logprobs, publish

CREDENTIALS = Credentials({"generate": "generate-secret", "admin": "admin-secret"})
CONFIG = EngineConfig(threads=1, max_batch=8, kv_tokens=4000)
DEADLINE_S = 60.0


class ScriptedCore:
    """The smallest core there can be: tokens are digests of what a completion may depend on."""

    capabilities = Capabilities(max_completions=8, adjustable_threads=False, reads_store=True, openai_routes=False)
    is_alive = True

    def __init__(self, store: WeightStore):
        self._store = store
        self._version = NO_VERSION
        self._num_running = 0
        self._running: set[asyncio.Task] = set()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if request.policy_version != self._version or self._version == NO_VERSION:
            raise WrongVersion(f"this engine holds {self._version}")
        if not request.prompt_ids or not request.seeds or request.sampling.max_tokens < 1:
            raise Refused("a prompt, seeds and max_tokens are needed")
        if len(request.seeds) > self.capabilities.max_completions:
            raise TooLarge("too many completions")
        task, self._num_running = asyncio.current_task(), self._num_running + len(request.seeds)
        assert task is not None
        self._running.add(task)
        try:
            await asyncio.sleep(0.005 * request.sampling.max_tokens)
        except asyncio.CancelledError:
            if self._version != request.policy_version:
                task.uncancel()
                raise Reloading("another version is being loaded") from None
            raise
        finally:
            self._running.discard(task)
            self._num_running -= len(request.seeds)
        return GenerateReply(request.request_id, self._version, [_drawn(request, seed) for seed in request.seeds])

    async def load(self, version: int) -> None:
        self._version = NO_VERSION
        for task in self._running:
            task.cancel()
        for is_canary in (True, False):
            weights = named_weights(model := build_tiny_model("qwen3"))
            probe = required_probe(self._store.load_into(weights, version))
            if is_canary:
                negate_for_canary(weights, probe.seed)
            check_proof(version, probe, own_logprobs(model, probe.sequences), "float32", is_canary=is_canary)
        self._version = version

    def status(self) -> EngineStatus:
        return EngineStatus(self._version, self._num_running, 0, 0, 0.0, 1)

    async def failure(self) -> str:
        await asyncio.Event().wait()
        raise EngineFailed("never")


def _drawn(request: GenerateRequest, seed: int) -> Completion:
    identity = f"{request.policy_version}/{request.prompt_ids}/{seed}/{request.sampling}".encode()
    token_ids = [byte % VOCABULARY for byte in hashlib.sha256(identity).digest()][: request.sampling.max_tokens]
    return Completion(token_ids, [-1.0] * len(token_ids), "length")


@asynccontextmanager
async def _scripted(model_dir: Path, config: EngineConfig, store: WeightStore | None) -> AsyncIterator[EngineCore]:
    assert store is not None
    yield ScriptedCore(store)


CORES: dict[str, Callable[..., AbstractAsyncContextManager[EngineCore]]] = {
    "embedded": ENGINE_KINDS["embedded"],
    "scripted": _scripted,
}  # vllm goes through the same in tests/vllm, where there is one


class Engine(HttpEngineClient):
    """An engine as the conductor reaches it, and its core to look into."""

    core: EngineCore
    store: WeightStore


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny_model("qwen3").save_pretrained(folder)
    return folder


@pytest.fixture(params=sorted(CORES))
async def engine(request, model_dir: Path, tmp_path: Path) -> AsyncIterator[Engine]:
    """An engine that has loaded nothing; the store holds the versions 3 and 4, and 5 with one byte changed."""
    store = WeightStore(tmp_path, keep=3)
    for version in (3, 4, 5):
        publish(store, build_tiny_model("qwen3", seed=version), version)
    weights = store.folder(5) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    async with Listener("127.0.0.1", 0) as listener, CORES[request.param](model_dir, CONFIG, store) as core:
        server = make_server(core, CREDENTIALS, model_dir, "tiny")
        async with server.serving(listener) as url, open_session() as session:
            engine = Engine(session, url, CREDENTIALS)
            engine.core, engine.store = core, store
            yield engine


def asking(version: int = 3, *, seeds=(1, 2, 3), prompt=(5, 6, 7), max_tokens: int = 6) -> GenerateRequest:
    return GenerateRequest("r", version, list(prompt), list(seeds), Sampling(max_tokens=max_tokens))


async def version_of(engine: Engine) -> int:
    return (await engine.status(DEADLINE_S)).policy_version


async def test_it_holds_no_version_until_one_was_loaded_and_says_which_it_holds(engine: Engine):
    assert await version_of(engine) == NO_VERSION
    for version in (3, 4):
        await engine.load(version, DEADLINE_S)
        assert await version_of(engine) == version


async def test_every_reply_names_its_request_and_the_version_that_drew_it(engine: Engine):
    for version in (3, 4):
        await engine.load(version, DEADLINE_S)
        reply = await engine.generate(asking(version), DEADLINE_S)
        assert (reply.request_id, reply.policy_version) == ("r", version)


@pytest.mark.parametrize("version", [NO_VERSION, 2, 4])
async def test_another_version_than_the_one_it_holds_is_refused(engine: Engine, version: int):
    with pytest.raises(EngineError) as before_a_load:
        await engine.generate(asking(version), DEADLINE_S)
    await engine.load(3, DEADLINE_S)
    with pytest.raises(EngineError) as after_it:
        await engine.generate(asking(version), DEADLINE_S)
    assert before_a_load.value.wrong_version and after_it.value.wrong_version


@pytest.mark.parametrize("version", [5, 9, -1], ids=["damaged", "missing", "none"])
async def test_a_load_that_fails_leaves_no_version_and_a_good_one_heals(engine: Engine, version: int):
    await engine.load(3, DEADLINE_S)
    with pytest.raises(EngineError) as caught:
        await engine.load(version, DEADLINE_S)
    assert caught.value.refused
    assert await version_of(engine) == NO_VERSION
    with pytest.raises(EngineError):
        await engine.generate(asking(3), DEADLINE_S)
    await engine.load(3, DEADLINE_S)
    assert len((await engine.generate(asking(3), DEADLINE_S)).completions) == 3


@pytest.mark.parametrize("which", ["logprobs", "canary_logprobs"])
async def test_a_version_is_served_only_if_what_is_computed_is_what_the_trainer_computes(engine: Engine, which: str):
    alter_probe(engine.store, 3, which, by=0.01)
    with pytest.raises(
        EngineError, match=r"v3 are loaded but not what is computed: .* 0\.01 apart and at most 0\.001"
    ) as no:
        await engine.load(3, DEADLINE_S)
    assert no.value.refused
    assert await version_of(engine) == NO_VERSION
    await engine.load(4, DEADLINE_S)
    assert await version_of(engine) == 4


async def test_a_version_without_a_probe_is_not_served(engine: Engine):
    alter_probe(engine.store, 3, None)
    with pytest.raises(EngineError, match="weights v3 carry no probe"):
        await engine.load(3, DEADLINE_S)


def alter_probe(store: WeightStore, version: int, which: str | None, by: float = 0.0) -> None:
    """As if the trainer had computed something else; without a name it has computed nothing."""
    manifest = read_manifest(store.root, version)
    probe = manifest.probe
    if probe is not None and which:
        values = [value + by for value in getattr(probe, which)]
        probe = msgspec.structs.replace(probe, **{which: values})
    altered = msgspec.structs.replace(manifest, probe=probe if which else None)
    (store.folder(version) / MANIFEST_FILE).write_bytes(msgspec.json.encode(altered))


async def test_a_seed_gives_the_same_completion_whoever_is_beside_it(engine: Engine):
    await engine.load(3, DEADLINE_S)
    together = (await engine.generate(asking(seeds=(1, 2, 3)), DEADLINE_S)).completions
    alone = [(await engine.generate(asking(seeds=(seed,)), DEADLINE_S)).completions[0] for seed in (1, 2, 3)]
    beside, _ = await asyncio.gather(
        engine.generate(asking(seeds=(3, 2, 1)), DEADLINE_S),
        engine.generate(asking(seeds=(7, 8), prompt=(9, 9), max_tokens=9), DEADLINE_S),
    )
    assert together == alone == beside.completions[::-1]
    assert len({tuple(completion.token_ids) for completion in together}) > 1, "seeds differ"


async def test_other_weights_draw_other_tokens(engine: Engine):
    drawn = []
    for version in (3, 4):
        await engine.load(version, DEADLINE_S)
        drawn.append((await engine.generate(asking(version, max_tokens=12), DEADLINE_S)).completions)
    assert drawn[0] != drawn[1]


async def test_completions_are_whole(engine: Engine):
    await engine.load(3, DEADLINE_S)
    for completion in (await engine.generate(asking(max_tokens=5), DEADLINE_S)).completions:
        assert 1 <= len(completion.token_ids) <= 5
        assert len(completion.rollout_logprobs) == len(completion.token_ids)
        assert all(0 <= token_id < VOCABULARY for token_id in completion.token_ids)
        assert all(logprob <= 0 for logprob in completion.rollout_logprobs)
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 5


@pytest.mark.parametrize("wrong", [dict(max_tokens=0), dict(prompt=()), dict(seeds=()), dict(seeds=range(99))])
async def test_a_request_that_can_never_be_run_is_refused_and_harms_nothing(engine: Engine, wrong):
    await engine.load(3, DEADLINE_S)
    with pytest.raises(EngineError) as caught:
        await engine.generate(asking(**wrong), DEADLINE_S)
    assert caught.value.refused
    assert len((await engine.generate(asking(), DEADLINE_S)).completions) == 3


async def test_as_many_completions_as_it_is_capable_of_fit_into_one_request(engine: Engine):
    await engine.load(3, DEADLINE_S)
    most = engine.core.capabilities.max_completions
    assert len((await engine.generate(asking(seeds=range(most)), DEADLINE_S)).completions) == most


async def test_a_request_that_is_given_up_at_its_deadline_frees_what_it_held(engine: Engine):
    await engine.load(3, DEADLINE_S)
    with pytest.raises(EngineError, match="did not answer POST /generate within"):
        await engine.generate(asking(max_tokens=240, seeds=range(8)), 0.02)
    async with asyncio.timeout(DEADLINE_S):
        while engine.core.status().num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert len((await engine.generate(asking(), DEADLINE_S)).completions) == 3


async def test_a_load_ends_what_runs_with_the_old_version(engine: Engine):
    await engine.load(3, DEADLINE_S)
    running = asyncio.create_task(engine.generate(asking(max_tokens=240, seeds=range(8)), DEADLINE_S))
    async with asyncio.timeout(DEADLINE_S):
        while not engine.core.status().num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await engine.load(4, DEADLINE_S)
    with pytest.raises(EngineError) as caught:
        await running
    assert not caught.value.refused, "asked again, it may be served"


async def test_threads_can_be_set_only_where_the_engine_says_so(engine: Engine):
    if engine.core.capabilities.adjustable_threads:
        await engine.set_threads(2, DEADLINE_S)
        assert (await engine.status(DEADLINE_S)).num_threads == 2
    else:
        with pytest.raises(EngineError, match="404"):
            await engine.set_threads(2, DEADLINE_S)


def test_every_kind_that_can_be_configured_exists():
    assert set(get_args(get_type_hints(EngineConfig)["kind"])) == set(ENGINE_KINDS)
