"""What a chaos plan does to an engine: it breaks the engine's answers, its loads or its process."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from polyrhythm import messages
from polyrhythm.chaos.plan import ANSWERS, REQUEST, SIGNALS, SNAPSHOTS, Fault, Faults, damage, faults_of
from polyrhythm.http.server import read_body
from polyrhythm.observe.activity import Activity
from polyrhythm.weights.store import WeightStore

IDLE_S = 0.01
OVERTAKEN_DEADLINE_S = 2.0
MIDDLE_DEADLINE_S = 1.0
TICK_S = 0.002
HELD_DEADLINE_S = 600.0
HELD_TICK_S = 0.05

MakeMiddleware = Callable[[Any], Middleware]
"""Given the engine that a server is made for."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def fault_middleware(run_dir: Path, name: str, store: WeightStore) -> MakeMiddleware | None:
    """The engine's hook: what its server puts before every handler in a run with a chaos plan."""
    faults = faults_of(run_dir, name)
    if faults is None:
        return None
    return lambda engine: FaultyEngine(faults, store, lambda: engine.status().num_running).middleware


class FaultyEngine:
    """Its `middleware` stands before all others. `num_running` tells how many completions are being generated."""

    def __init__(self, faults: Faults, store: WeightStore, num_running: Callable[[], int]):
        self._faults = faults
        self._store = store
        self._num_running = num_running
        self._num_asked = 0
        self._num_answered = 0
        self._last_answer: bytes | None = None

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/generate":
            return await self._generate(request, handler)
        if request.path == "/weights/load":
            return await self._load(request, handler)
        return await handler(request)

    async def _generate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = messages.decode(await read_body(request, messages.CONTENT_TYPE), messages.GenerateRequest)
        fault = self._faults.due(REQUEST, asked.policy_version, impossible=() if self._last_answer else ("duplicate",))
        self._num_asked += 1
        try:
            if fault is None:
                response = await handler(request)
            elif fault.what in SIGNALS:
                response = await self._signal_in_the_middle(fault, request, handler, asked)
            else:
                self._faults.record(fault, asked.policy_version, f"request {asked.request_id}")
                response = await self._spoilt(fault, request, handler)
        finally:
            self._num_answered += 1
        if fault is None and isinstance(response, web.Response) and response.status == 200:
            self._last_answer = _body_of(response)
        if self._num_asked == self._num_answered:
            asyncio.get_running_loop().call_later(IDLE_S, self._signal_if_idle, self._num_asked, asked.policy_version)
        return response

    async def _spoilt(self, fault: Fault, request: web.Request, handler: Handler) -> web.StreamResponse:
        if fault.what == "error":
            return web.Response(status=500, text="a fault by plan")
        if fault.what == "duplicate":
            assert self._last_answer is not None
            return _packed(self._last_answer)
        started_s, num_answered = time.monotonic(), self._num_answered
        response = await handler(request)
        if not isinstance(response, web.Response) or response.status != 200:
            return response  # refused for a reason of its own
        if fault.what == "slow":
            await asyncio.sleep(fault.for_s + (fault.factor - 1) * (time.monotonic() - started_s))
            if fault.until:
                await _wait_for(Path(fault.until).exists, HELD_DEADLINE_S, HELD_TICK_S)
        elif fault.what == "reorder":
            await _wait_for(lambda: self._num_answered >= num_answered + 2, OVERTAKEN_DEADLINE_S)
        elif fault.what == "reset":
            return await _reset(request, _body_of(response))
        return _packed(_altered(fault, _body_of(response))) if fault.what in ANSWERS else response

    async def _signal_in_the_middle(
        self, fault: Fault, request: web.Request, handler: Handler, asked: messages.GenerateRequest
    ) -> web.StreamResponse:
        """Let the request begin, then strike before it is answered."""
        generating = asyncio.ensure_future(handler(request))
        await _wait_for(lambda: generating.done() or self._num_running() > 0, MIDDLE_DEADLINE_S)
        detail = f"request {asked.request_id}, {self._num_running()} completions running"
        self._signal(fault, asked.policy_version, detail)
        return await generating

    def _signal_if_idle(self, num_asked: int, step: int) -> None:
        if self._num_asked != num_asked or self._num_running():
            return
        if fault := self._faults.due(Activity.IDLE, step):
            self._signal(fault, step, "idle")

    def _signal(self, fault: Fault, step: int, detail: str) -> None:
        self._faults.record(fault, step, detail)
        os.kill(os.getpid(), signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)

    async def _load(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        version = messages.decode(await read_body(request, messages.CONTENT_TYPE), messages.LoadRequest).version
        fault = self._faults.due(Activity.LOAD, version)
        if fault is None:
            return await handler(request)
        if fault.what in SIGNALS:
            self._signal(fault, version, f"asked to load version {version}")
            return await handler(request)
        self._faults.record(fault, version, f"load of version {version}")
        if fault.what in SNAPSHOTS:
            with _damaged(self._store, version, fault.what):
                return await handler(request)
        return web.Response(status=500, text="a load that fails by plan")


@contextlib.contextmanager
def _damaged(store: WeightStore, version: int, what: str) -> Iterator[None]:
    """This engine finds a damaged copy of the snapshot for as long as one attempt takes; the others are not touched."""
    with tempfile.TemporaryDirectory() as folder:
        root, store.root = store.root, Path(folder)
        try:
            shutil.copytree(root / store.folder(version).name, store.folder(version))
            damage(max(store.folder(version).glob("*.safetensors")), what)
            yield
        finally:
            store.root = root


def _altered(fault: Fault, body: bytes) -> bytes:
    if fault.what == "truncate":
        return body[: len(body) // 2]
    reply = messages.decode(body, messages.GenerateReply)
    if fault.what == "wrong_version":
        reply = msgspec.structs.replace(reply, policy_version=reply.policy_version - 1)
    elif fault.what == "nan":
        first, *rest = reply.completions
        broken = msgspec.structs.replace(first, rollout_logprobs=[float("nan")] * len(first.token_ids))
        reply = msgspec.structs.replace(reply, completions=[broken, *rest])
    return messages.encode(reply)


async def _reset(request: web.Request, body: bytes) -> web.StreamResponse:
    """Send half of the answer, then reset the connection."""
    response = web.StreamResponse(headers={"Content-Type": messages.CONTENT_TYPE, "Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    transport = request.transport
    if transport is not None:
        no_linger = struct.pack("ii", 1, 0)  # closing sends RST instead of FIN
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        transport.abort()
    return response


async def _wait_for(condition: Callable[[], bool], deadline_s: float, tick_s: float = TICK_S) -> None:
    for _ in range(int(deadline_s / tick_s)):
        if condition():
            return
        await asyncio.sleep(tick_s)


def _body_of(response: web.Response) -> bytes:
    assert isinstance(response.body, bytes)
    return response.body


def _packed(body: bytes) -> web.Response:
    return web.Response(body=body, content_type=messages.CONTENT_TYPE)
