"""The engine's HTTP server. Bodies are msgpack; errors are one line of text, their status says whose mistake it was."""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from polyrhythm import wire
from polyrhythm.config import EngineConfig
from polyrhythm.engine.core import InferenceEngine
from polyrhythm.engine.refusals import Refused
from polyrhythm.errors import RunError
from polyrhythm.weights.store import SnapshotError, WeightStore

_JOIN_DEADLINE_S = 30.0
_JOIN_RETRY_S = 0.5
_BODY_DEADLINE_S = 30.0
_CLOSE_DEADLINE_S = 5.0

ENGINE = web.AppKey("engine", InferenceEngine)
TOKENS = web.AppKey("tokens", dict[str, str])
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)


class ThreadsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Compute with this many CPU threads from now on."""

    num_threads: int


def make_app(engine: InferenceEngine, tokens: dict[str, str]) -> web.Application:
    """The routes of an engine. `tokens` holds those of the scopes "generate" and "admin"; admin may do everything."""
    app = web.Application(client_max_size=wire.MAX_BODY_BYTES, middlewares=[_errors_as_text])
    app[ENGINE] = engine
    app[TOKENS] = tokens
    app.router.add_get("/health", _health)
    app.router.add_get("/status", _needs("generate", _status))
    app.router.add_post("/generate", _needs("generate", _generate))
    app.router.add_post("/weights/load", _needs("admin", _load))
    app.router.add_post("/threads", _needs("admin", _threads))
    return app


async def run_engine(
    *,
    model_dir: Path,
    store_root: Path | None,
    name: str,
    host: str,
    port: int,
    tokens: dict[str, str],
    config: EngineConfig,
    join_url: str | None,
    ready: Callable[[str], None],
) -> None:
    """Serve a model until cancelled; port 0 takes a free one. `ready` is called with the address once it answers."""
    store = WeightStore(store_root) if store_root is not None else None
    async with InferenceEngine(model_dir, config, store=store) as engine:
        runner = web.AppRunner(
            make_app(engine, tokens),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_CLOSE_DEADLINE_S,
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
            url = f"http://{host}:{runner.addresses[0][1]}"
            ready(url)
            if join_url is not None:
                await _join(join_url, wire.JoinRequest(name, url), tokens["admin"])
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()


async def _join(join_url: str, request: wire.JoinRequest, token: str) -> None:
    """Ask the conductor to be used, again and again until it answers or the deadline has passed."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": wire.CONTENT_TYPE}
    timeout = aiohttp.ClientTimeout(total=_JOIN_DEADLINE_S)
    problem = "no answer"
    try:
        async with (
            asyncio.timeout(_JOIN_DEADLINE_S),
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
        ):
            while True:
                try:
                    async with session.post(f"{join_url}/engines/join", data=wire.encode(request)) as reply:
                        if reply.status < 300:
                            return
                        problem = f"status {reply.status}: {(await reply.text())[:200]}"
                except aiohttp.ClientError as error:
                    problem = str(error)
                await asyncio.sleep(_JOIN_RETRY_S)
    except TimeoutError as error:
        raise RunError(f"engine {request.name} could not join {join_url}: {problem}") from error


def _needs(scope: str, handler: Handler) -> Handler:
    """The handler behind a check of the bearer token, in time that does not depend on the token given."""

    async def checked(request: web.Request) -> web.StreamResponse:
        tokens = request.app[TOKENS]
        given = request.headers.get("Authorization", "").encode()
        matching = [name for name, token in tokens.items() if hmac.compare_digest(given, f"Bearer {token}".encode())]
        if not matching:
            raise web.HTTPUnauthorized(text="a valid token is needed")
        if scope not in matching and "admin" not in matching:
            raise web.HTTPForbidden(text=f"this token does not allow {scope}")
        return await handler(request)

    return checked


@web.middleware
async def _errors_as_text(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as refusal:
        return web.Response(status=refusal.status, text=str(refusal))
    except SnapshotError as error:
        return web.Response(status=422, text=str(error))
    except web.HTTPException as error:
        return web.Response(status=error.status, text=error.text, headers=_allowed_methods(error))
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return web.Response(status=500, text="the engine failed on this request; its log has the cause")


def _allowed_methods(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": ", ".join(sorted(error.allowed_methods))} if isinstance(error, web.HTTPMethodNotAllowed) else {}


async def _health(request: web.Request) -> web.Response:
    alive = request.app[ENGINE].is_alive
    return web.Response(status=200 if alive else 503, text="ok" if alive else "the engine has failed")


async def _status(request: web.Request) -> web.Response:
    return _packed(request.app[ENGINE].status())


async def _generate(request: web.Request) -> web.Response:
    return _packed(await request.app[ENGINE].generate(await _body(request, wire.GenerateRequest)))


async def _load(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    await engine.load((await _body(request, wire.LoadRequest)).version)
    return _packed(engine.status())


async def _threads(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    engine.set_threads((await _body(request, ThreadsRequest)).num_threads)
    return _packed(engine.status())


async def _body(request: web.Request, kind: type[T]) -> T:
    if request.content_type != wire.CONTENT_TYPE:
        raise web.HTTPUnsupportedMediaType(text=f"send {wire.CONTENT_TYPE}")
    try:
        async with asyncio.timeout(_BODY_DEADLINE_S):
            content = await request.read()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(text="the request body came too slowly") from error
    try:
        return wire.decode(content, kind)
    except msgspec.DecodeError as error:  # a ValidationError is one too
        raise Refused(f"malformed request: {error}") from error


def _packed(message: Any) -> web.Response:
    return web.Response(body=wire.encode(message), content_type=wire.CONTENT_TYPE)
