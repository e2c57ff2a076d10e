"""The engine's HTTP server. Bodies are msgpack; errors are one line of text, their status says whose mistake it was.

Under `/v1` both are JSON in the shape of the OpenAI API.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from polyrhythm import messages
from polyrhythm.config import EngineConfig
from polyrhythm.engine import metrics as prometheus
from polyrhythm.engine.embedded.engine import InferenceEngine
from polyrhythm.engine.membership import stay_in_run
from polyrhythm.engine.openai.api import OpenAiApi
from polyrhythm.engine.openai.replies import error_body, json_response, refusal_body
from polyrhythm.engine.refusals import Refused
from polyrhythm.errors import RunError
from polyrhythm.http.body import read_body
from polyrhythm.http.credentials import Credentials
from polyrhythm.http.guard import ConnectionGuard
from polyrhythm.http.listener import Listener
from polyrhythm.weights.store import SnapshotError, WeightStore

_CLOSE_DEADLINE_S = 5.0

ENGINE = web.AppKey("engine", InferenceEngine)
GUARD = web.AppKey("guard", ConnectionGuard)
CREDENTIALS: web.AppKey[Credentials | None] = web.AppKey("credentials")
METRICS = web.AppKey("metrics", prometheus.RequestMetrics)
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)


def make_app(
    engine: InferenceEngine,
    credentials: Credentials | None,
    api: OpenAiApi | None = None,
    outermost: Sequence[Middleware] = (),
) -> web.Application:
    """The routes of an engine, with those of the OpenAI API if there is one.

    `credentials` holds those of the scopes "generate" and "admin"; admin may do everything. Without credentials anybody may
    generate and nobody administrate.
    """
    app = web.Application(
        client_max_size=messages.MAX_BODY_BYTES, middlewares=[*outermost, _measured, _errors_as_replies]
    )
    app[ENGINE] = engine
    app[GUARD] = ConnectionGuard()
    app[CREDENTIALS] = credentials
    app[METRICS] = prometheus.RequestMetrics()
    app.router.add_get("/health", _health)
    app.router.add_get("/status", _needs("generate", _status))
    app.router.add_post("/generate", _needs("generate", _generate))
    app.router.add_post("/weights/load", _needs("admin", _load))
    app.router.add_post("/threads", _needs("admin", _threads))
    app.router.add_get("/metrics", _needs("generate", _metrics))
    for method, path, handler in api.routes() if api else ():
        app.router.add_route(method, path, _needs("generate", handler))
    return app


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
    fault_middleware: Callable[[InferenceEngine], Middleware] | None = None,
    lease_s: float = 60.0,
) -> None:
    """Serve a model until cancelled, or until the run at `join_url` lets it go.

    Port 0 takes a free one. `ready` is called with the address once it answers.

    `model_name` is what clients of the OpenAI API call the model; the name of its folder if there is none. `fault_middleware`
    is what a chaos plan puts before everything else.
    """
    async with Listener(host, port) as listener, InferenceEngine(model_dir, config, store=store) as engine:
        outermost = [fault_middleware(engine)] if fault_middleware else []
        api = OpenAiApi(engine, model_dir, model_name or model_dir.name)
        app = make_app(engine, credentials, api, outermost)
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_CLOSE_DEADLINE_S,
        )
        await runner.setup()
        assert runner.server is not None
        try:
            url = await listener.open(runner.server)
            ready(url)
            async with app[GUARD].watching(runner.server):
                if join_url is not None and credentials is not None:
                    me = messages.JoinRequest(name, url)
                    await _while_it_works(engine, stay_in_run(join_url, me, credentials["admin"], lease_s))
                else:
                    await _while_it_works(engine, asyncio.Event().wait())
        finally:
            listener.close()
            await runner.cleanup()


async def _while_it_works(engine: InferenceEngine, serving: Coroutine[Any, Any, object]) -> None:
    """Serve; an engine that cannot compute any more must not answer as if it could: RunError ends its process."""
    tasks = [asyncio.ensure_future(serving), asyncio.ensure_future(engine.failure())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
        else:
            raise RunError(str(tasks[1].result()))
    finally:
        for task in tasks:
            task.cancel()


def _needs(scope: str, handler: Handler) -> Handler:
    """The handler behind a check of the bearer token, in time that does not depend on the token given."""

    async def checked(request: web.Request) -> web.StreamResponse:
        credentials = request.app[CREDENTIALS]
        if credentials is None and scope == "generate":
            request.app[GUARD].admit(request)
            return await handler(request)
        matching = credentials.scopes_of(request.headers.get("Authorization", "")) if credentials else set()
        if not matching:
            raise web.HTTPUnauthorized(text="a valid token is needed")
        if scope not in matching and "admin" not in matching:
            raise web.HTTPForbidden(text=f"this token does not allow {scope}")
        request.app[GUARD].admit(request)
        return await handler(request)

    return checked


@web.middleware
async def _measured(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count a request for work and its seconds under its route."""
    started = time.monotonic()
    status = 499  # the client's leaving cancels the handler
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        resource = request.match_info.route.resource
        if resource is not None and request.method == "POST":
            request.app[METRICS].record(resource.canonical, status, time.monotonic() - started)


@web.middleware
async def _errors_as_replies(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as refusal:
        if _speaks_json(request):
            status, body = refusal_body(refusal)
            return json_response(body, status)
        return _error_reply(request, refusal.status, str(refusal))
    except SnapshotError as error:
        return _error_reply(request, 422, str(error))
    except web.HTTPException as error:
        reply = _error_reply(request, error.status, error.text or error.reason)
        reply.headers.update(_allowed_methods(error))
        return reply
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _error_reply(request, 500, "the engine failed on this request; its log has the cause")


def _speaks_json(request: web.Request) -> bool:
    return request.path.startswith("/v1/")


def _error_reply(request: web.Request, status: int, message: str) -> web.Response:
    if _speaks_json(request):
        return json_response(error_body(status, message), status)
    return web.Response(status=status, text=message)


def _allowed_methods(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": ", ".join(sorted(error.allowed_methods))} if isinstance(error, web.HTTPMethodNotAllowed) else {}


async def _health(request: web.Request) -> web.Response:
    alive = request.app[ENGINE].is_alive
    return web.Response(status=200 if alive else 503, text="ok" if alive else "the engine has failed")


async def _status(request: web.Request) -> web.Response:
    return _packed(request.app[ENGINE].status())


async def _metrics(request: web.Request) -> web.Response:
    text = prometheus.metrics_text(request.app[ENGINE], request.app[METRICS])
    return web.Response(body=text.encode(), headers={"Content-Type": prometheus.CONTENT_TYPE})


async def _generate(request: web.Request) -> web.Response:
    return _packed(await request.app[ENGINE].generate(await _body(request, messages.GenerateRequest)))


async def _load(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    await engine.load((await _body(request, messages.LoadRequest)).version)
    return _packed(engine.status())


async def _threads(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    engine.set_threads((await _body(request, messages.ThreadsRequest)).num_threads)
    return _packed(engine.status())


async def _body(request: web.Request, kind: type[T]) -> T:
    content = await read_body(request, messages.CONTENT_TYPE)
    try:
        return messages.decode(content, kind)
    except msgspec.DecodeError as error:  # a ValidationError is one too
        raise Refused(f"malformed request: {error}") from error


def _packed(message: Any) -> web.Response:
    return web.Response(body=messages.encode(message), content_type=messages.CONTENT_TYPE)
