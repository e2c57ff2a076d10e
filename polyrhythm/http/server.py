"""The server base: who may call what, how much and how slowly a client may send, how trouble is said, start and end."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence, Set
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from polyrhythm import messages
from polyrhythm.http.credentials import ADMIN, Credentials
from polyrhythm.http.errors import Refusal
from polyrhythm.http.guard import ConnectionGuard
from polyrhythm.http.listener import Listener

BODY_DEADLINE_S = 30.0
PUBLIC = "public"
"""The scope of routes that need no credential, such as /health."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SayError = Callable[[web.Request, int, str, Refusal | None], web.Response]

log = logging.getLogger(__name__)


class Unauthorized(Refusal):
    status = 401


class Forbidden(Refusal):
    status = 403


class WrongType(Refusal):
    status = 415


class TooSlow(Refusal):
    status = 408


def plain_error(request: web.Request, status: int, said: str, refusal: Refusal | None) -> web.Response:
    return web.Response(status=status, text=said)


class HttpServer:
    """Routes behind credentials. Handlers raise `Refusal` for what they expect to go wrong; all else is a logged 500.

    server = HttpServer(credentials)
    server.add("admin", [web.post("/drain", drain)])
    async with Listener(host, port) as listener, load_what_takes_long():
        async with server.serving(listener) as url:
            ready(url)
            await until_the_end()

    Whoever shows the credential of "admin" may do everything. `open_scopes` need no credential here. `outermost` middlewares
    stand before everything else, and `say_error` gives errors another shape than one line of text.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        open_scopes: Set[str] = frozenset(),
        outermost: Sequence[Middleware] = (),
        say_error: SayError = plain_error,
        shutdown_deadline_s: float = 5.0,
    ):
        self._credentials = credentials
        self._open_scopes = open_scopes
        self._say_error = say_error
        self._shutdown_deadline_s = shutdown_deadline_s
        self._guard = ConnectionGuard()
        self._scopes: dict[web.AbstractRoute, str] = {}
        self.app = web.Application(client_max_size=messages.MAX_BODY_BYTES, middlewares=[*outermost, self._answer])

    def add(self, scope: str, routes: Iterable[web.RouteDef]) -> None:
        """Serve these routes to whoever has the scope."""
        self.app.add_routes(list(routes))
        # Not only what add_routes returns: `web.get` adds a route for HEAD too, and does not tell.
        for route in self.app.router.routes():
            self._scopes.setdefault(route, scope)

    @contextlib.asynccontextmanager
    async def serving(self, listener: Listener) -> AsyncIterator[str]:
        """Answer at a listener that is bound already; yields the URL. Leaving cancels what takes longer than a moment."""
        runner = web.AppRunner(
            self.app,
            handler_cancellation=True,  # whoever is gone waits for nothing any more
            access_log=None,
            shutdown_timeout=self._shutdown_deadline_s,
        )
        await runner.setup()
        assert runner.server is not None
        try:
            url = await listener.open(runner.server)
            async with self._guard.watching(runner.server):
                yield url
        finally:
            listener.close()
            await runner.cleanup()

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._admit(request)
            return await handler(request)
        except Refusal as refusal:
            return self._say_error(request, refusal.status, _one_line(str(refusal)), refusal)
        except web.HTTPException as error:
            reply = self._say_error(request, error.status, _one_line(error.text or error.reason), None)
            if isinstance(error, web.HTTPMethodNotAllowed):
                reply.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
            return reply
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return self._say_error(request, 500, "the server failed on this request; its log has the cause", None)

    def _admit(self, request: web.Request) -> None:
        """Let the request pass if it shows what its route asks for; strangers do not learn which paths and methods there are."""
        scope = self._scopes.get(request.match_info.route)  # None: there is no such path, or not with this method
        if scope == PUBLIC:
            return
        if not (scope in self._open_scopes or (scope is None and self._open_scopes)):
            shown = self._credentials.scopes_of(request.headers.get("Authorization", ""))
            if not shown:
                raise Unauthorized("a token is needed")
            if scope is not None and not shown & {scope, ADMIN}:
                raise Forbidden(f"this token does not allow {scope}")
        self._guard.admit(request)


async def read_body(request: web.Request, content_type: str) -> bytes:
    """The body, if it is of this type and comes in time; the server's limit of size holds for every body."""
    # Asking for the type also keeps out web pages: a browser sends other types than forms only with permission.
    if request.content_type != content_type:
        raise WrongType(f"send {content_type}")
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            return await request.read()
    except TimeoutError as error:
        raise TooSlow("the request body came too slowly") from error


async def read_message(request: web.Request, kind: type[T]) -> T:
    """The body as a message of `polyrhythm.messages`."""
    try:
        return messages.decode(await read_body(request, messages.CONTENT_TYPE), kind)
    except msgspec.DecodeError as error:  # a ValidationError is one too
        raise Refusal(f"malformed request: {error}") from error


def packed(message: Any) -> web.Response:
    return web.Response(body=messages.encode(message), content_type=messages.CONTENT_TYPE)


def as_json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _one_line(text: str) -> str:
    return " ".join(text.split())
