"""The engine: one compute thread that owns the model, the cache and the schedule; asyncio in front of it."""

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyrhythm.config import EngineConfig
from polyrhythm.devices import free_memory
from polyrhythm.devices.memory import default_kv_tokens
from polyrhythm.engine.embedded.batch import DecodeBatch, draws_of
from polyrhythm.engine.embedded.model_runner import load_runner
from polyrhythm.engine.embedded.probing import NUMBER_FORMAT, probe_logprobs
from polyrhythm.engine.embedded.sampler import Draws, Sampler
from polyrhythm.engine.embedded.scheduler import ActiveRequest, Scheduler
from polyrhythm.engine.embedded.stops import StopStrings
from polyrhythm.engine.kinds import NO_VERSION, NewToken
from polyrhythm.engine.refusals import EngineFailed, Refused, Reloading, WrongVersion
from polyrhythm.kernels.spinning import SpinControl
from polyrhythm.messages import Capabilities, EngineStatus, GenerateReply, GenerateRequest
from polyrhythm.weights.export import named_weights
from polyrhythm.weights.proof import check_proof, negate_for_canary, required_probe
from polyrhythm.weights.store import WeightStore

MAX_THREADS = 1024
_CLOSE_DEADLINE_S = 30.0
_IDLE_WAIT_S = 1.0

log = logging.getLogger(__name__)


class InferenceEngine:
    """Generates completions with one model and one version of its weights at a time.

    Without a weight store it serves the model folder's own weights as version 0. `generate`, `load` and `status` are
    called on an event loop; they hand work to the compute thread and wait for its answer. Cancelling `generate` frees
    what the request held. The thread that makes an engine is left with one CPU thread.
    """

    def __init__(
        self, model_dir: Path, config: EngineConfig, *, store: WeightStore | None = None, stop_at_eos: bool = True
    ):
        # OpenMP keeps a pool for every thread that computes. With more threads than cores its waiting threads sleep at once,
        # and waking them costs a quarter of a decoding step: only the compute thread may have a pool.
        torch.set_num_threads(1)
        self._runner = load_runner(model_dir, context_length=config.context_length)
        self._store = store
        self.capabilities = Capabilities(
            max_completions=config.max_batch,
            adjustable_threads=True,
            reads_store=store is not None,
            openai_routes=True,
        )
        self._stops = StopStrings(model_dir, self._runner.vocab_size)
        self._eos_ids = _eos_ids(self._runner.model) if stop_at_eos else frozenset()
        num_slots = config.kv_tokens or _default_kv_tokens(self._runner, config.max_batch)
        self._cache = self._runner.new_cache(num_slots)
        self._sampler = Sampler(self._runner.vocab_size)
        self._scheduler = Scheduler(
            max_rows=config.max_batch,
            num_slots=num_slots,
            context_length=self._runner.context_length,
            vocab_size=self._runner.vocab_size,
        )
        self._batch: DecodeBatch | None = None
        self._draws: Draws | None = None
        self._policy_version = NO_VERSION if store else 0
        self._has_shown_canary = False
        self._num_tokens_generated = 0
        self._busy_s = 0.0
        self._num_threads = config.threads or os.cpu_count() or 1
        self._failure: str | None = None
        self._failed: Future[str] = Future()
        self._loading = asyncio.Lock()
        self._replies: dict[Future[GenerateReply], int] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-compute", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> "InferenceEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[list[NewToken]], object] | None = None
    ) -> GenerateReply:
        """The completions of a request; raises `Refused` if it cannot be run as asked.

        `on_tokens` is called on the event loop with the tokens of each decoding step, the last ones before this returns.
        """
        self._check_alive()
        self._scheduler.check(request)
        if request.sampling.stop:
            await asyncio.to_thread(self._stops.prepare, request.sampling.stop)
        # Nothing is awaited between this check and the request being known, so no load can come between them.
        if self._policy_version == NO_VERSION or request.policy_version != self._policy_version:
            raise WrongVersion(
                f"asked for policy version {request.policy_version}, this engine holds {self._policy_version}"
            )
        reply: Future[GenerateReply] = Future()
        self._replies[reply] = len(request.seeds)
        reply.add_done_callback(lambda done: self._replies.pop(done))
        deliver = partial(asyncio.get_running_loop().call_soon_threadsafe, on_tokens) if on_tokens else None
        active = ActiveRequest(request, reply, deliver)
        self._inbox.put(lambda: self._scheduler.add(active))
        return await asyncio.wrap_future(reply)

    async def load(self, version: int) -> None:
        """Load and verify a version from the weight store; meanwhile, and after a failure, the engine holds none.

        Requests that still run belong to a version that nobody trains any more: they end here.
        """
        self._check_alive()
        if self._store is None:
            raise Refused("this engine serves a model folder and has no weight store to load from")
        store = self._store

        def load() -> None:
            self._end_all(Reloading, f"version {version} is being loaded: ask again")
            if not self._has_shown_canary:
                self._load_and_prove(store, version, is_canary=True)
                self._has_shown_canary = True
            self._load_and_prove(store, version, is_canary=False)

        async with self._loading:
            self._policy_version = NO_VERSION  # from here on nothing new is taken
            await self._on_compute_thread(load)
            self._policy_version = version

    def set_threads(self, num_threads: int) -> None:
        """Use this many CPU threads from the next decoding step on."""
        if not 1 <= num_threads <= MAX_THREADS:
            raise Refused(f"threads={num_threads}: from 1 to {MAX_THREADS}")
        self._num_threads = num_threads
        self._inbox.put(lambda: torch.set_num_threads(num_threads))

    def status(self) -> EngineStatus:
        num_submitted = sum(list(self._replies.values()))
        return EngineStatus(
            policy_version=self._policy_version,
            num_running=self._scheduler.num_rows_running,
            num_waiting=max(0, num_submitted - self._scheduler.num_rows_admitted),
            num_tokens_generated=self._num_tokens_generated,
            busy_s=self._busy_s,
            num_threads=self._num_threads,
            num_kv_tokens=self._cache.padding_slot,
            num_kv_tokens_used=self._scheduler.num_slots_used,
        )

    async def close(self) -> None:
        """End the compute thread; requests that are still running fail."""
        self._closing.set()
        self._inbox.put(lambda: None)
        await asyncio.to_thread(self._thread.join, _CLOSE_DEADLINE_S)

    @property
    def context_length(self) -> int:
        return self._runner.context_length

    async def failure(self) -> str:
        """Waits, as long as the engine works, for the reason why it works no more."""
        return await asyncio.wrap_future(self._failed)

    @property
    def is_alive(self) -> bool:
        return self._failure is None

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(self._failure)

    async def _on_compute_thread(self, work: Callable[[], None]) -> None:
        done: Future[None] = Future()

        def run() -> None:
            try:
                work()
            except Exception as error:
                _answer(done.set_exception, error)
            else:
                _answer(done.set_result, None)

        self._inbox.put(run)
        # A load that was begun is finished even if its client has gone: half-loaded weights belong to nobody.
        await asyncio.shield(asyncio.wrap_future(done))

    def _load_and_prove(self, store: WeightStore, version: int, *, is_canary: bool) -> None:
        """Load weights or their canary; raises unless what is computed from now on is what the trainer computes."""
        weights = named_weights(self._runner.model)
        probe = required_probe(store.load_into(weights, version))
        if is_canary:
            negate_for_canary(weights, probe.seed)
        self._runner.refresh()
        logprobs = probe_logprobs(self._runner, probe.sequences)
        check_proof(version, probe, logprobs, NUMBER_FORMAT, is_canary=is_canary)

    def _run(self) -> None:
        with SpinControl():
            self._compute()

    def _compute(self) -> None:
        """The compute thread: consumes the inbox, produces replies, waits for work, is unblocked by the inbox."""
        try:
            torch.set_num_threads(self._num_threads)
            while not self._closing.is_set():
                self._receive()
                self._drop_abandoned()
                if self._scheduler.unfinished():
                    started = time.perf_counter()
                    self._step()
                    self._busy_s += time.perf_counter() - started
            self._fail_all("the engine is closed")
        except Exception as error:
            log.exception("the compute thread failed")
            self._policy_version = NO_VERSION
            self._fail_all(f"the engine failed: {type(error).__name__}: {error}")
            self._failed.set_result(self._failure or "")

    def _receive(self) -> None:
        """Take what is in the inbox; wait for it when there is nothing else to do."""
        idle = not self._scheduler.unfinished()
        while True:
            try:
                self._inbox.get(block=idle, timeout=_IDLE_WAIT_S)()
            except queue.Empty:
                return
            idle = False

    def _drop_abandoned(self) -> None:
        for request in self._scheduler.unfinished():
            if request.reply.cancelled():
                self._scheduler.retire(request)
                self._batch = self._draws = None

    def _fail_all(self, reason: str) -> None:
        self._failure = reason
        while not self._inbox.empty():
            self._inbox.get()()
        self._end_all(EngineFailed, reason)

    def _end_all(self, refusal: type[Refused], reason: str) -> None:
        for request in self._scheduler.unfinished():
            self._scheduler.retire(request)
            _answer(request.reply.set_exception, refusal(reason))
        self._batch = self._draws = None

    @torch.inference_mode()
    def _step(self) -> None:
        """One token for every running completion, and the first one for every request whose prompt is done."""
        self._scheduler.admit()
        running = list(self._scheduler.running)
        parts: list[Any] = []  # of the runner's own kind
        joining: list[ActiveRequest] = []
        wanted: list[int] = []
        if running:
            if self._batch is None:
                self._batch = DecodeBatch(running, self._cache.padding_slot, self._runner.device)
            parts.append(self._runner.decode(self._cache, self._batch))
            wanted.append(0)
        for request, chunk in self._scheduler.prefill_chunks():
            parts.append(self._runner.prefill(self._cache, request.where, chunk, request.num_prefilled))
            if request.num_prefilled + len(chunk) == len(request.request.prompt_ids):
                joining.append(request)
                wanted.append(len(parts) - 1)
        results = self._runner.run(parts)
        if not wanted:
            return
        hidden = results[wanted[0]] if len(wanted) == 1 else self._joined(results, wanted)
        if self._draws is None or self._batch is None or joining:
            self._draws = draws_of(running, joining)
        logits = self._runner.logits(hidden)
        tokens, logprobs = self._sampler.draw(logits, self._draws)
        self._num_tokens_generated += len(tokens)
        for request in joining:
            self._scheduler.start_decoding(request)
        self._record([*running, *joining], tokens, logprobs, changed=bool(joining))

    def _joined(self, results: list[Tensor], wanted: list[int]) -> Tensor:
        """The rows to draw from: those of running completions without their padding, then one per joining request."""
        rows = [results[index] for index in wanted]
        if self._batch is not None:
            rows[0] = rows[0][: self._batch.num_rows]
        return torch.cat(rows)

    def _record(self, requests: list[ActiveRequest], tokens: np.ndarray, logprobs: np.ndarray, changed: bool) -> None:
        """Give every request its tokens, end completions, and move the batch on or have it rebuilt."""
        first = 0
        for request in requests:
            last = first + request.num_active
            request.append(tokens[first:last], logprobs[first:last])
            first = last
            changed |= self._finish_completions(request)
        if changed or self._batch is None or self._draws is None:
            self._batch = self._draws = None
        else:
            self._batch.advance(tokens)
            self._draws.positions += np.uint64(1)

    def _finish_completions(self, request: ActiveRequest) -> bool:
        """End the completions that met a stop or their length; whether there were any."""
        sampling = request.request.sampling
        completions = request.strips.copy()
        drawn = request.tokens[completions, : request.num_generated]
        stop_ids = [*self._eos_ids, *sampling.stop_token_ids]
        stopped = set(np.flatnonzero(np.isin(drawn[:, -1], stop_ids)).tolist())
        stopped.update(self._stops.completed(drawn, sampling.stop))
        at_limit = request.num_generated == sampling.max_tokens
        ending = range(request.num_active) if at_limit else sorted(stopped)
        for strip in reversed(ending):
            last = request.finish_strip(strip, "stop" if strip in stopped else "length")
            if strip != last:
                self._cache.move_strip(request.where, last, strip, request.num_generated - 1)
        if request.on_tokens:
            request.on_tokens(request.newest(completions))
        if not request.num_active:
            self._scheduler.retire(request)
            reply = GenerateReply(request.request.request_id, self._policy_version, request.completions())
            _answer(request.reply.set_result, reply)
        return bool(ending)


def _answer(settle: Callable[[Any], None], value: Any) -> None:
    try:
        settle(value)
    except InvalidStateError:
        log.debug("the client has gone before its answer")


def _eos_ids(model: Any) -> frozenset[int]:
    ids: set[int] = set()
    for source in (model.config, model.generation_config):
        eos = source.eos_token_id
        ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return frozenset(ids)


def _default_kv_tokens(runner: Any, max_batch: int) -> int:
    """By the memory of the device: on a CPU the cache is virtual until it is used, on an accelerator all of it is taken."""
    available = free_memory(runner.device)
    return default_kv_tokens(available, runner.kv_bytes_per_token, max_batch, runner.context_length)
