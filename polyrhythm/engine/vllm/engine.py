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
from polyrhythm.engine.kinds import NO_VERSION, Invitation
from polyrhythm.engine.refusals import EngineFailed, Refused, Reloading, TooLarge, WrongVersion
from polyrhythm.engine.vllm.checking import CALL_DEADLINE_S, READY_TICK_S, Hello, check_server, wait_until_ready
from polyrhythm.engine.vllm.client import VllmClient
from polyrhythm.engine.vllm.launching import check_vllm, command_of, variables_of
from polyrhythm.engine.vllm.process import VllmProcess
from polyrhythm.engine.vllm.worker.polyrhythm_worker import RECEIVED
from polyrhythm.errors import RunError, UserError
from polyrhythm.http.errors import CallFailed, DeadlinePassed, ErrorReply
from polyrhythm.messages import Capabilities, EngineStatus, GenerateReply, GenerateRequest
from polyrhythm.tokenizer import Tokenizer
from polyrhythm.types import Completion, Sampling
from polyrhythm.weights.proof import ProofFailed, canary_columns, check_proof, required_probe
from polyrhythm.weights.snapshot import Manifest, SnapshotError, loading_deadline_s
from polyrhythm.weights.store import WeightStore

LOAD_DEADLINE_S = 600.0
GENERATE_DEADLINE_S = 3600.0
RESET_DEADLINE_S = 30.0
WATCH_TICK_S = 1.0
MAX_SILENCES = 10
"""So many looks in a row may go unanswered by a server that is busy."""
MAX_CANARIES = 3
"""A server that computes something else than the canary so often will never compute what it is given."""

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
        await wait_until_ready(client, process, config)
        hello = await check_server(client, f"at {config.url}" if config.url else "of engine.python")
        engine = VllmEngine(client, process, config, store, tokenizer, context_length, hello)
        watch = asyncio.create_task(engine.watch())
        try:
            yield engine
        finally:
            watch.cancel()


class VllmEngine:
    """An `EngineCore`. Completions are asked for one by one, each with its seed."""

    def __init__(
        self, client: VllmClient, process: VllmProcess | None, config: EngineConfig, store: WeightStore,
        tokenizer: Tokenizer, context_length: int, hello: Hello,
    ):  # fmt: skip
        self.capabilities = Capabilities(
            max_completions=config.max_batch, adjustable_threads=False, reads_store=True, openai_routes=False,
            num_receivers=hello.num_workers,
        )  # fmt: skip
        self._client = client
        self._process = process
        self._store = store
        self._num_threads = config.threads
        self._vocab_size = tokenizer.vocab_size
        self._eos_ids = tokenizer.eos_token_ids
        self._context_length = context_length
        self._number_format = hello.number_format
        self._policy_version = NO_VERSION
        self._has_shown_canary = False
        self._has_received = False
        self._num_failed_canaries = 0
        self._is_hopeless = False
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
        """Waits, as long as the engine works, for the reason why it works no more; UserError if a restart cannot help."""
        reason = await asyncio.shield(self._failed)
        if self._is_hopeless:
            raise UserError(reason)
        return reason

    def status(self) -> EngineStatus:
        num_running = min(self._num_in_flight, self.capabilities.max_completions)
        return EngineStatus(
            policy_version=self._policy_version,
            num_running=num_running,
            num_waiting=self._num_in_flight - num_running,
            num_tokens_generated=self._num_tokens_generated,
            busy_s=self._busy_s,
            num_threads=self._num_threads,
            has_received=self._has_received,
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

    async def load(self, version: int, invitation: Invitation | None = None) -> None:
        """Load and prove a version of the weight store; meanwhile, and after a failure, the engine holds none.

        Who is invited to a broadcast need not read it there, if what arrives is what was published.
        """
        self._check_alive()
        # A load that was begun is finished even if its client has gone: half-loaded weights belong to nobody.
        loading = asyncio.create_task(self._load(version, invitation))
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

    async def _load(self, version: int, invitation: Invitation | None) -> None:
        async with self._loading:
            self._policy_version, self._has_received = NO_VERSION, False  # from here on nothing new is taken
            manifest = await asyncio.to_thread(self._store.manifest, version)
            try:
                if invitation is not None and self._has_shown_canary:
                    self._has_received = await self._receive(invitation, manifest)
                if not self._has_received:
                    await self._read_store(manifest)
            except CallFailed as error:
                self._fail(f"a load of version {version} failed half-way, and nobody knows what vLLM holds: {error}")
                raise EngineFailed(str(error)) from error
            self._policy_version = version

    async def _receive(self, invitation: Invitation, manifest: Manifest) -> bool:
        """Load and prove what a broadcast brings. False, with nothing loaded, if it does not bring what was published."""
        meeting = invitation.meeting
        arguments = {
            "num_bytes": str(sum(entry.num_bytes for entry in manifest.tensors.values())),
            "url": invitation.url,
            "credential": invitation.credential,
            "meeting": json.dumps([meeting.number, meeting.member, meeting.num_members, meeting.deadline_s]),
        }
        await self._post("/pause?mode=abort")
        missed = await self._call_workers("polyrhythm_receive", arguments, "missed", manifest)
        try:
            if missed:
                raise SnapshotError(missed)
            await self._load_weights(manifest, RECEIVED, is_canary=False)
        except SnapshotError as error:
            log.warning("weights v%d did not come by broadcast, the store is read: %s", manifest.version, error)
            return False
        await self._prove(manifest, is_canary=False)
        return True

    async def _read_store(self, manifest: Manifest) -> None:
        """Load and prove what is in the weight store, the canary first if none was shown."""
        folder = await asyncio.to_thread(self._store.local_folder, manifest.version)
        for is_canary in (False,) if self._has_shown_canary else (True, False):
            try:
                await self._load_weights(manifest, str(folder), is_canary=is_canary)
            except SnapshotError:
                self._store.refuse(manifest.version)
                raise
            await self._prove(manifest, is_canary=is_canary)
            self._has_shown_canary = True

    async def _load_weights(self, manifest: Manifest, folder: str, *, is_canary: bool) -> None:
        """Weights or their canary, from a folder or as received; SnapshotError if the workers have refused them untouched."""
        version, probe = manifest.version, required_probe(manifest)
        await self._post("/pause?mode=abort")
        arguments = {
            "folder": folder,
            "files": json.dumps(manifest.files),
            "table": json.dumps(_table(manifest, probe.seed if is_canary else None, is_received=folder == RECEIVED)),
        }
        if refused := await self._call_workers("polyrhythm_load", arguments, "refused", manifest):
            raise SnapshotError(f"weights v{version}: {refused}")
        self._num_loads += 1
        await self._post("/update_weight_version", {"new_version": self._label(version, is_canary)})
        await self._reset_prefix_cache()
        await self._post("/resume")

    async def _prove(self, manifest: Manifest, *, is_canary: bool) -> None:
        """Raises unless what is computed from now on is what the trainer computes."""
        probe = required_probe(manifest)
        logprobs = [x for sequence in probe.sequences for x in await self._logprobs(sequence)]
        try:
            check_proof(manifest.version, probe, logprobs, self._number_format, is_canary=is_canary)
        except ProofFailed as error:
            self._num_failed_canaries += is_canary
            if self._num_failed_canaries == MAX_CANARIES:
                self._is_hopeless = True
                self._fail(
                    f"vLLM does not compute with what it has loaded, in {MAX_CANARIES} of {MAX_CANARIES} proofs: {error}. "
                    'Use another version or build of vLLM, other engine.options, or engine.kind="embedded"'
                )
            raise

    async def _call_workers(self, method: str, arguments: dict[str, str], trouble: str, manifest: Manifest) -> str:
        """Call our extension in every worker of vLLM; what the first that has trouble says of it."""
        deadline_s = loading_deadline_s(LOAD_DEADLINE_S, manifest.num_bytes)
        call = {"method": method, "kwargs": arguments, "timeout": deadline_s}
        answer = await self._client.post("/collective_rpc", call, deadline_s=deadline_s)
        return next((worker[trouble] for worker in answer["results"] if trouble in worker), "")

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


def _table(manifest: Manifest, canary_seed: int | None, *, is_received: bool = False) -> list[list[Any]]:
    """The tensors of a snapshot for the worker, with the columns to negate if it is a canary's.

    What is received lies one tensor after the other.
    """
    rows, received = [], 0
    for name, entry in manifest.tensors.items():
        columns = (0, 0)
        if canary_seed is not None and entry.is_floating_point:
            columns = canary_columns(canary_seed, name, entry.shape)
        file, offset = (RECEIVED, received) if is_received else (entry.file, entry.offset)
        pieces = [(piece.offset, piece.num_bytes, piece.digest) for piece in entry.pieces]
        rows.append([name, entry.dtype, entry.shape, file, offset, entry.num_bytes, pieces, *columns])
        received += entry.num_bytes
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
