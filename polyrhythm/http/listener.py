"""Where a server listens: taken first, so that a port in use is found before anything is loaded for it."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from yarl import URL

from polyrhythm.errors import UserError

LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""How the processes of this machine reach a server that listens at all addresses."""


class Listener:
    """`async with Listener(host, port) as listener` binds the address; connections are refused until it is opened."""

    def __init__(self, host: str, port: int, keys: str = ""):
        """`keys` are those of the configuration that say where, for the message of an address that cannot be taken."""
        self._host = host
        self._port = port
        self._keys = keys
        self._accept: Callable[[], asyncio.BaseProtocol]
        self._server: asyncio.Server

    async def __aenter__(self) -> "Listener":
        loop = asyncio.get_running_loop()
        with self._naming_the_address():
            self._server = await loop.create_server(lambda: self._accept(), self._host, self._port, start_serving=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def open(self, accept: Callable[[], asyncio.BaseProtocol]) -> str:
        """Answer connections from now on, each with a protocol that `accept` makes; the URL."""
        self._accept = accept
        with self._naming_the_address():  # of two that have bound the same port only one may listen
            await self._server.start_serving()
        here = LOOPBACK_OF.get(self._host, self._host)
        return str(URL.build(scheme="http", host=here, port=self._server.sockets[0].getsockname()[1]))

    def close(self) -> None:
        """Accept nothing new; connections that are there stay."""
        self._server.close()

    @contextlib.contextmanager
    def _naming_the_address(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            see = f" (see {self._keys})" if self._keys else ""
            raise UserError(f"cannot listen at {self._host} port {self._port}: {error.strerror}{see}") from None
