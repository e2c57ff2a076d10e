"""The client of an event loop: the same promises as the blocking one, over a session that many clients share."""

import asyncio
from typing import Any

import aiohttp

from polyrhythm import messages
from polyrhythm.http.credentials import bearer
from polyrhythm.http.errors import AnswerTooLarge, DeadlinePassed, ErrorReply, NoAnswer

CONNECT_DEADLINE_S = 5.0


def open_session() -> aiohttp.ClientSession:
    """Connections for any number of clients; what is in flight is limited by those who call."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar())


class AsyncClient:
    """Talks to one server, called `peer` in errors. Raises `CallFailed`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, peer: str):
        self._session = session
        self._url = url.rstrip("/")
        self._peer = peer

    async def call(
        self,
        method: str,
        path: str,
        message: Any = None,
        *,
        credential: str,
        deadline_s: float,
        is_idempotent: bool = False,
    ) -> bytes:
        """The body of a successful answer. A call that may be repeated is, once, if the connection turns out to be dead."""
        body = None if message is None else messages.encode(message)
        try:
            async with asyncio.timeout(deadline_s):
                try:
                    return await self._exchange(method, path, body, credential)
                except aiohttp.ServerDisconnectedError:
                    if not is_idempotent:
                        raise
                    return await self._exchange(method, path, body, credential)
        except aiohttp.ConnectionTimeoutError:
            raise NoAnswer(f"{self._peer} cannot be reached: no connection in {CONNECT_DEADLINE_S:g} s") from None
        except TimeoutError:
            raise DeadlinePassed(f"{self._peer} did not answer {method} {path} within {deadline_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: an address that is none
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise NoAnswer(f"{self._peer} cannot be reached by {method} {path}: {said}") from error

    async def _exchange(self, method: str, path: str, body: bytes | None, credential: str) -> bytes:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_DEADLINE_S)
        headers = {"Authorization": bearer(credential), "Content-Type": messages.CONTENT_TYPE}
        async with self._session.request(
            method, self._url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            content = bytearray()
            async for piece in response.content.iter_any():
                content += piece
                if len(content) > messages.MAX_BODY_BYTES:
                    raise AnswerTooLarge(
                        f"{self._peer} answered {method} {path} with more than {messages.MAX_BODY_BYTES} bytes"
                    )
        if response.status != 200:
            raise ErrorReply(self._peer, response.status, bytes(content))
        return bytes(content)
