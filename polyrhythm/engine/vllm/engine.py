"""The engine core around a vLLM server: one version at a time, each loaded by our extension and proven before it is served."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from polyrhythm.config import EngineConfig
from polyrhythm.engine.kinds import NO_VERSION
from polyrhythm.engine.refusals import EngineFailed, Refused, Reloading, TooLarge, WrongVersion
from polyrhythm.engine.vllm.client import VllmClient
from polyrhythm.engine.vllm.launching import check_routes, check_version, check_vllm, command_of, variables_of
from polyrhythm.engine.vllm.process import VllmProcess
from polyrhythm.engine.vllm.worker.polyrhythm_worker import PROTOCOL
from polyrhythm.errors import RunError, UserError
from polyrhythm.http.errors import CallFailed, DeadlinePassed, ErrorReply
from polyrhythm.messages import Capabilities, EngineStatus, GenerateReply, GenerateRequest
from polyrhythm.tokenizer import Tokenizer
from polyrhythm.types import Completion, Sampling
from polyrhythm.weights.proof import TOLERANCES, canary_columns, check_proof, required_probe
from polyrhythm.weights.snapshot import Manifest, Probe, SnapshotError, read_manifest
from polyrhythm.weights.store import WeightStore

CALL_DEADLINE_S = 30.0
LOAD_DEADLINE_S = 600.0
GENERATE_DEADLINE_S = 3600.0
RESET_DEADLINE_S = 30.0
READY_TICK_S = 0.25
WATCH_TICK_S = 1.0
MAX_SILENCES = 10
"""So many looks in a row may go unanswered by a server that is busy."""

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_vllm(model_dir: Path, config: EngineConfig, store: WeightStore | None) -> "AsyncIterator[VllmEngine]":
    """Start a private server, or find the user's own, and check that it can be used."""
    if store is None:
        raise UserError("an engine of kind vllm serves a run: to serve a model folder, use `vllm serve` itself")
    tokenizer = Tokenizer(model_dir)
    context_length = config.context_length or tokenizer.context_length
    async with AsyncExitStack() as stack:
        if config.url:
            process, client = None, VllmClient(url=config.url)
        else:
            version = await asyncio.to_thread(check_vllm, config)
            command_for = partial(_command, config, version, model_dir, context_length)
            process = stack.enter_context(VllmProcess(command_for, variables_of))
            client = VllmClient(socket=process.socket)
        await stack.enter_async_context(client)
        await _wait_until_ready(client, process, config)
        number_format = await _check_server(client, f"at {config.url}" if config.url else "of engine.python")
        engine = VllmEngine(client, process, config, store, tokenizer, context_length, number_format)
        watch = asyncio.create_task(engine.watch())
        try:
            yield engine
        finally:
            watch.cancel()


class VllmEngine:
    """An `EngineCore`. Completions are asked for one by one, each with its seed."""

    def __init__(
        self, client: VllmClient, process: VllmProcess | None, config: EngineConfig, store: WeightStore,
        tokenizer: Tokenizer, context_length: int, number_format: str,
    ):  # fmt: skip
        self.capabilities = Capabilities(
            max_completions=config.max_batch, adjustable_threads=False, reads_store=True, openai_routes=False
        )
        self._client = client
        self._process = process
        self._store = store
        self._num_threads = config.threads
        self._vocab_size = tokenizer.vocab_size
        self._eos_ids = tokenizer.eos_token_ids
        self._context_length = context_length
        self._number_format = number_format
        self._policy_version = NO_VERSION
        self._has_shown_canary = False
        self._salt = secrets.token_hex(8)
        self._num_loads = 0
        self._loading = asyncio.Lock()
        self._num_in_flight = 0
        self._num_tokens_generated = 0
        self._busy_s = 0.0
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def is_alive(self) -> bool:
        return not self._failed.done()

    async def failure(self) -> str:
        """Waits, as long as the engine works, for the reason why it works no more."""
        return await asyncio.shield(self._failed)

    def status(self) -> EngineStatus:
        num_running = min(self._num_in_flight, self.capabilities.max_completions)
        return EngineStatus(
            policy_version=self._policy_version,
            num_running=num_running,
            num_waiting=self._num_in_flight - num_running,
            num_tokens_generated=self._num_tokens_generated,
            busy_s=self._busy_s,
            num_threads=self._num_threads,
        )

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """The completions of a request; raises `Refused` if it cannot be run as asked."""
        self._check_alive()
        self._check(request)
        version = self._policy_version
        if version == NO_VERSION or request.policy_version != version:
            raise WrongVersion(f"asked for policy version {request.policy_version}, this engine holds {version}")
        tasks = [asyncio.create_task(self._complete(request, seed, version)) for seed in request.seeds]
        self._num_in_flight += len(tasks)
        try:
            return GenerateReply(request.request_id, version, await asyncio.gather(*tasks))
        finally:
            self._num_in_flight -= len(tasks)
            for task in tasks:  # a connection that is closed ends its completion
                task.cancel()

    async def load(self, version: int) -> None:
        """Load and prove a version of the weight store; meanwhile, and after a failure, the engine holds none."""
        self._check_alive()
        # A load that was begun is finished even if its client has gone: half-loaded weights belong to nobody.
        loading = asyncio.create_task(self._load(version))
        loading.add_done_callback(lambda done: done.cancelled() or done.exception())  # its client may have gone
        await asyncio.shield(loading)

    async def watch(self) -> None:
        """Produces progress and the end of the engine; waits for the next look, ends by being cancelled."""
        silences = 0
        while not self._failed.done():
            await asyncio.sleep(WATCH_TICK_S)
            self._busy_s += WATCH_TICK_S * bool(self._num_in_flight)
            try:
                if self._process is not None:
                    self._process.check_runs()
                await self._client.get("/health", deadline_s=CALL_DEADLINE_S)
                num_tokens = await self._client.num_tokens_generated(deadline_s=CALL_DEADLINE_S)
                self._num_tokens_generated, silences = num_tokens, 0
            except (RunError, UserError, ErrorReply) as error:
                self._fail(str(error))
            except CallFailed as error:
                silences += 1
                if silences >= MAX_SILENCES:
                    self._fail(str(error))

    async def _load(self, version: int) -> None:
        async with self._loading:
            self._policy_version = NO_VERSION  # from here on nothing new is taken
            folder = await asyncio.to_thread(self._store.local_folder, version)
            manifest = read_manifest(folder.parent, version)
            probe = required_probe(manifest)
            try:
                if not self._has_shown_canary:
                    await self._load_and_prove(folder, manifest, probe, is_canary=True)
                    self._has_shown_canary = True
                await self._load_and_prove(folder, manifest, probe, is_canary=False)
            except CallFailed as error:
                self._fail(f"a load of version {version} failed half-way, and nobody knows what vLLM holds: {error}")
                raise EngineFailed(str(error)) from error
            self._policy_version = version

    async def _load_and_prove(self, folder: Path, manifest: Manifest, probe: Probe, *, is_canary: bool) -> None:
        """Load weights or their canary; raises unless what is computed from now on is what the trainer computes."""
        version = manifest.version
        await self._post("/pause?mode=abort")
        arguments = {
            "folder": str(folder),
            "files": json.dumps(manifest.files),
            "table": json.dumps(_table(manifest, probe.seed if is_canary else None)),
        }
        call = {"method": "polyrhythm_load", "kwargs": arguments, "timeout": LOAD_DEADLINE_S}
        answer = await self._client.post("/collective_rpc", call, deadline_s=LOAD_DEADLINE_S)
        if refused := [worker["refused"] for worker in answer["results"] if "refused" in worker]:
            self._store.refuse(version)
            raise SnapshotError(f"weights v{version}: {refused[0]}")
        self._num_loads += 1
        await self._post("/update_weight_version", {"new_version": self._label(version, is_canary)})
        await self._reset_prefix_cache()
        await self._post("/resume")
        logprobs = [x for sequence in probe.sequences for x in await self._logprobs(sequence)]
        check_proof(version, probe, logprobs, self._number_format, is_canary=is_canary)

    async def _complete(self, request: GenerateRequest, seed: int, version: int) -> Completion:
        sampling = _sampling(request.sampling) | {
            "seed": seed,
            "stop_token_ids": [*self._eos_ids, *request.sampling.stop_token_ids],
        }
        try:
            choice = await self._ask(request.prompt_ids, sampling, GENERATE_DEADLINE_S)
        except ErrorReply as error:
            refusal = Refused if error.status == Refused.status else Reloading
            raise refusal(str(error)) from error
        except CallFailed as error:
            raise Reloading(str(error)) from error
        if choice["finish_reason"] not in ("stop", "length"):
            raise Reloading("another version is being loaded: ask again")
        token_ids = choice["token_ids"]
        spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]
        if spans != [(self._label(version), 0, len(token_ids))]:
            raise WrongVersion(f"not all tokens were drawn by version {version}: vLLM says {spans}")
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        return Completion(token_ids, logprobs, choice["finish_reason"])

    async def _logprobs(self, sequence: list[int]) -> list[float]:
        """Of every token of a prompt but the first."""
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": sequence, "sampling_params": sampling, "cache_salt": self._cache_salt}
        answer = await self._client.post("/inference/v1/generate", body, deadline_s=LOAD_DEADLINE_S)
        tokens = zip(answer["prompt_logprobs"][1:], sequence[1:], strict=True)
        return [of_position[str(token_id)]["logprob"] for of_position, token_id in tokens]

    async def _ask(self, token_ids: list[int], sampling: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        body = {"token_ids": token_ids, "sampling_params": sampling, "cache_salt": self._cache_salt}
        (choice,) = (await self._client.post("/inference/v1/generate", body, deadline_s=deadline_s))["choices"]
        return choice

    async def _reset_prefix_cache(self) -> None:
        """Blocks are held until the requests that were aborted have gone."""
        until_s = time.monotonic() + RESET_DEADLINE_S
        while not (await self._post("/reset_prefix_cache"))["success"]:
            if time.monotonic() > until_s:
                raise DeadlinePassed(f"vLLM did not give up its prefix cache within {RESET_DEADLINE_S:g} s")
            await asyncio.sleep(READY_TICK_S)

    async def _post(self, path: str, body: Any = None) -> Any:
        return await self._client.post(path, body, deadline_s=CALL_DEADLINE_S)

    def _check(self, request: GenerateRequest) -> None:
        """What vLLM would answer with less than it was asked for, or not at all."""
        num_tokens = len(request.prompt_ids) + request.sampling.max_tokens
        if not request.prompt_ids or not request.seeds or request.sampling.max_tokens < 1:
            raise Refused("a prompt, seeds and at least one token to generate are needed")
        if not all(0 <= token_id < self._vocab_size for token_id in request.prompt_ids):
            raise Refused(f"the prompt has token ids outside of the vocabulary of {self._vocab_size}")
        if num_tokens > self._context_length:
            raise TooLarge(f"prompt and completion of {num_tokens} tokens: at most {self._context_length} fit")
        if len(request.seeds) > self.capabilities.max_completions:
            raise TooLarge(
                f"{len(request.seeds)} completions: at most {self.capabilities.max_completions} decode together"
            )

    def _check_alive(self) -> None:
        if self._failed.done():
            raise EngineFailed(self._failed.result())

    def _fail(self, reason: str) -> None:
        self._policy_version = NO_VERSION
        if not self._failed.done():
            self._failed.set_result(reason)

    def _label(self, version: int, is_canary: bool = False) -> str:
        return f"canary of {version}" if is_canary else str(version)

    @property
    def _cache_salt(self) -> str:
        """What was computed before a load is nobody's prefix after it, even if a reset were missed."""
        return f"{self._salt}-{self._num_loads}"


def _command(config: EngineConfig, version: str, model_dir: Path, context_length: int, socket: Path) -> list[str]:
    return command_of(config, version, model_dir, socket, context_length)


def _table(manifest: Manifest, canary_seed: int | None) -> list[list[Any]]:
    """The tensors of a snapshot for the worker, with the columns to negate if it is a canary's."""
    rows = []
    for name, entry in manifest.tensors.items():
        columns = (0, 0)
        if canary_seed is not None and entry.is_floating_point:
            columns = canary_columns(canary_seed, name, entry.shape)
        pieces = [(piece.offset, piece.num_bytes, piece.digest) for piece in entry.pieces]
        rows.append([name, entry.dtype, entry.shape, entry.file, entry.offset, entry.num_bytes, pieces, *columns])
    return rows


def _sampling(sampling: Sampling) -> dict[str, Any]:
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop": list(sampling.stop),
        "logprobs": 0,  # of the token that was drawn
        "skip_special_tokens": False,  # stop strings see what was drawn
        "detokenize": bool(sampling.stop),
    }


async def _wait_until_ready(client: VllmClient, process: VllmProcess | None, config: EngineConfig) -> None:
    until_s = time.monotonic() + config.joins_within_s
    while True:
        if process is not None:
            process.check_runs()
        try:
            await client.get("/health", deadline_s=CALL_DEADLINE_S)
            return
        except CallFailed as error:
            if time.monotonic() > until_s:
                raise RunError(f"vLLM was not ready within {config.joins_within_s:g} s: {error}") from None
        await asyncio.sleep(READY_TICK_S)


async def _check_server(client: VllmClient, where: str) -> str:
    """The number format it computes in; UserError if it is not a server that can be used."""
    check_routes(await client.get("/openapi.json", deadline_s=CALL_DEADLINE_S), where)
    version = json.loads(await client.get("/version", deadline_s=CALL_DEADLINE_S))["version"]
    check_version(version, f"the server {where}")
    try:
        answer = await client.post("/collective_rpc", {"method": "polyrhythm_hello"}, deadline_s=CALL_DEADLINE_S)
    except ErrorReply as error:
        raise UserError(f"vLLM {where} does not have our worker extension: see docs/vllm.md ({error})") from None
    hello = answer["results"][0]
    if hello["protocol"] != PROTOCOL:
        raise UserError(f"vLLM {where} has the worker extension of another version of Polyrhythm: start it again")
    if hello["number_format"] not in TOLERANCES:
        known = ", ".join(TOLERANCES)
        raise UserError(f"vLLM {where} computes in {hello['number_format']}, which proves nothing: use one of {known}")
    await client.num_tokens_generated(deadline_s=CALL_DEADLINE_S)
    return hello["number_format"]
