"""The engine server, the same for every kind. Bodies are msgpack; errors are one line of text, their status says whose mistake it was.

Under `/v1` both are JSON in the shape of the OpenAI API.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from aiohttp import web
from aiohttp.typedefs import Middleware

from polyrhythm import messages
from polyrhythm.config import EngineConfig
from polyrhythm.engine.kinds import ENGINE_KINDS, AdjustableCore, EngineCore, Invitation, ReceivingCore, StreamingCore
from polyrhythm.engine.membership import stay_in_run
from polyrhythm.engine.metrics import EngineMetrics
from polyrhythm.engine.openai.api import OpenAiApi
from polyrhythm.engine.openai.replies import say_error
from polyrhythm.engine.refusals import Unloadable
from polyrhythm.errors import RunError
from polyrhythm.http.credentials import ADMIN, Credentials
from polyrhythm.http.listener import Listener
from polyrhythm.http.server import PUBLIC, Handler, HttpServer, packed, read_message
from polyrhythm.setups import setup_of
from polyrhythm.weights.snapshot import SnapshotError
from polyrhythm.weights.store import WeightStore

GENERATE = "generate"


def make_server(
    core: EngineCore,
    credentials: Credentials | None,
    model_dir: Path,
    model_name: str,
    outermost: Sequence[Middleware] = (),
    conductor_url: str | None = None,
) -> HttpServer:
    """The routes of an engine as far as its core is capable of them.

    Without credentials anybody may generate and nobody administrate.
    """
    metrics = EngineMetrics(core.status)
    invite = partial(Invitation, conductor_url, credentials[ADMIN]) if conductor_url and credentials else None
    routes = EngineRoutes(core, metrics, invite)
    server = HttpServer(
        credentials or Credentials({}),
        open_scopes=frozenset() if credentials else frozenset({GENERATE}),
        outermost=[*outermost, _measured(metrics)],
        say_error=say_error,
    )
    server.add(PUBLIC, [web.get("/health", routes.health)])
    server.add(
        GENERATE,
        [
            web.get("/status", routes.status),
            web.get("/metrics", routes.metrics),
            web.post("/generate", routes.generate),
        ],
    )
    server.add(ADMIN, [web.post("/weights/load", routes.load)])
    if core.capabilities.adjustable_threads:
        server.add(ADMIN, [web.post("/threads", routes.threads)])
    if core.capabilities.openai_routes:
        server.add(GENERATE, OpenAiApi(cast(StreamingCore, core), model_dir, model_name).routes())
    return server


async def run_engine(
    *,
    model_dir: Path,
    store: WeightStore | None,
    name: str,
    host: str,
    port: int,
    credentials: Credentials | None,
    config: EngineConfig,
    join_url: str | None,
    ready: Callable[[str], None],
    model_name: str | None = None,
    fault_middleware: Callable[[EngineCore], Middleware] | None = None,
    lease_s: float = 60.0,
) -> None:
    """Serve a model with an engine of `config.kind` until cancelled, or until the run at `join_url` lets it go.

    Port 0 takes a free one. `ready` is called with the address once it answers.

    `model_name` is what clients of the OpenAI API call the model; the name of its folder if there is none. `fault_middleware`
    is what a chaos plan puts before everything else.
    """
    open_core = ENGINE_KINDS[config.kind]
    async with Listener(host, port) as listener, open_core(model_dir, config, store) as core:
        outermost = [fault_middleware(core)] if fault_middleware else []
        server = make_server(core, credentials, model_dir, model_name or model_dir.name, outermost, join_url)
        async with server.serving(listener) as url:
            ready(url)
            if join_url is not None and credentials is not None:
                me = messages.JoinRequest(name, url, core.capabilities, setup_of(model_dir))
                await _while_it_works(core, stay_in_run(join_url, me, credentials[ADMIN], lease_s))
            else:
                await _while_it_works(core, asyncio.Event().wait())


async def _while_it_works(core: EngineCore, serving: Coroutine[Any, Any, object]) -> None:
    """Serve; an engine that cannot compute any more must not answer as if it could: RunError ends its process."""
    tasks = [asyncio.ensure_future(serving), asyncio.ensure_future(core.failure())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
        else:
            raise RunError(str(tasks[1].result()))
    finally:
        for task in tasks:
            task.cancel()


class EngineRoutes:
    """Each decodes a message, asks the core, and encodes the answer."""

    def __init__(
        self, core: EngineCore, metrics: EngineMetrics, invite: Callable[[messages.Meeting], Invitation] | None
    ):
        self._core = core
        self._metrics = metrics
        self._invite = invite

    async def health(self, _: web.Request) -> web.Response:
        alive = self._core.is_alive
        return web.Response(status=200 if alive else 503, text="ok" if alive else "the engine has failed")

    async def status(self, _: web.Request) -> web.Response:
        return packed(self._core.status())

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.page(), headers={"Content-Type": self._metrics.content_type})

    async def generate(self, request: web.Request) -> web.Response:
        return packed(await self._core.generate(await read_message(request, messages.GenerateRequest)))

    async def load(self, request: web.Request) -> web.Response:
        asked = await read_message(request, messages.LoadRequest)
        try:
            if asked.meeting and self._invite and self._core.capabilities.num_receivers:
                await cast(ReceivingCore, self._core).load(asked.version, self._invite(asked.meeting))
            else:
                await self._core.load(asked.version)
        except SnapshotError as error:
            raise Unloadable(str(error)) from error
        return packed(self._core.status())

    async def threads(self, request: web.Request) -> web.Response:
        num_threads = (await read_message(request, messages.ThreadsRequest)).num_threads
        cast(AdjustableCore, self._core).set_threads(num_threads)
        return packed(self._core.status())


def _measured(metrics: EngineMetrics) -> Middleware:
    """Counts requests for work and their seconds under their route."""

    @web.middleware
    async def measured(request: web.Request, handler: Handler) -> web.StreamResponse:
        started_s = time.monotonic()
        status = 499  # the client's leaving cancels the handler
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            if resource is not None and request.method == "POST":
                metrics.record(resource.canonical, status, time.monotonic() - started_s)

    return measured
