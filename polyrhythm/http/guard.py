"""Connections on which nobody has shown a token in time are closed: aiohttp itself waits for a request forever."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from aiohttp import web

PATIENCE_S = 15.0
CHECKS_PER_PATIENCE = 3


class ConnectionGuard:
    """`admit` is called with each request that may pass; `watching` turns away the connections that had none."""

    def __init__(self, patience_s: float = PATIENCE_S):
        self._patience_s = patience_s
        self._admitted: set[web.RequestHandler] = set()
        self._seen_s: dict[web.RequestHandler, float] = {}

    def admit(self, request: web.Request) -> None:
        self._admitted.add(request.protocol)

    @contextlib.asynccontextmanager
    async def watching(self, server: web.Server | None) -> AsyncIterator[None]:
        assert server is not None, "the runner is not set up"
        watch = asyncio.create_task(self._watch(server))
        try:
            yield
        finally:
            watch.cancel()

    async def _watch(self, server: web.Server) -> None:
        while True:
            await asyncio.sleep(self._patience_s / CHECKS_PER_PATIENCE)
            self._look(server.connections, time.monotonic())

    def _look(self, connections: list[web.RequestHandler], now_s: float) -> None:
        self._admitted &= set(connections)
        self._seen_s = {connection: self._seen_s.get(connection, now_s) for connection in connections}
        for connection, seen_s in self._seen_s.items():
            if connection not in self._admitted and now_s - seen_s > self._patience_s:
                connection.force_close()
