"""What the conductor says to an engine, over HTTP. Every call has a deadline and fails as EngineError."""

from typing import Protocol, TypeVar

import aiohttp
import msgspec

from polyrhythm import messages
from polyrhythm.messages import EngineStatus, GenerateReply, GenerateRequest, LoadRequest, ThreadsRequest

CONNECT_DEADLINE_S = 5.0
MAX_ERROR_CHARS = 300

T = TypeVar("T")


class EngineError(Exception):
    """A call to an engine failed.

    `refused`: it says that the request itself is wrong, or does not fit there; asking it again is no use.
    `wrong_version`: it does not hold the version that was asked for.
    """

    def __init__(self, message: str, *, refused: bool = False, wrong_version: bool = False):
        super().__init__(message)
        self.refused = refused
        self.wrong_version = wrong_version


class EngineClient(Protocol):
    """An engine as the conductor sees it."""

    async def generate(self, request: GenerateRequest, deadline_s: float) -> GenerateReply: ...

    async def load(self, version: int, deadline_s: float) -> None: ...

    async def status(self, deadline_s: float) -> EngineStatus: ...

    async def set_threads(self, num_threads: int, deadline_s: float) -> None: ...


class HttpEngineClient:
    """The embedded engine's HTTP interface, msgpack both ways."""

    def __init__(self, session: aiohttp.ClientSession, url: str, tokens: dict[str, str]):
        self._session = session
        self._url = url.rstrip("/")
        self._headers = {
            scope: {"Authorization": f"Bearer {token}", "Content-Type": messages.CONTENT_TYPE}
            for scope, token in tokens.items()
        }

    async def generate(self, request: GenerateRequest, deadline_s: float) -> GenerateReply:
        body = await self._call("POST", "/generate", "generate", deadline_s, messages.encode(request))
        return self._decode(body, GenerateReply)

    async def load(self, version: int, deadline_s: float) -> None:
        await self._call("POST", "/weights/load", "admin", deadline_s, messages.encode(LoadRequest(version)))

    async def status(self, deadline_s: float) -> EngineStatus:
        return self._decode(await self._call("GET", "/status", "admin", deadline_s), EngineStatus)

    async def set_threads(self, num_threads: int, deadline_s: float) -> None:
        await self._call("POST", "/threads", "admin", deadline_s, messages.encode(ThreadsRequest(num_threads)))

    async def _call(self, method: str, path: str, scope: str, deadline_s: float, body: bytes | None = None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=CONNECT_DEADLINE_S)
        try:
            async with self._session.request(
                method,
                self._url + path,
                data=body,
                headers=self._headers[scope],
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                answer = await read_limited(response)
        except TimeoutError as error:
            raise EngineError(f"{method} {path} was not answered within {deadline_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: an address that is none
            raise EngineError(f"{method} {path} failed: {type(error).__name__}: {error}") from error
        if response.status != 200:
            said = answer.decode(errors="replace")[:MAX_ERROR_CHARS]
            raise EngineError(
                f"{method} {path} answered {response.status}: {said}",
                refused=response.status in (400, 413, 422),
                wrong_version=response.status == 409,
            )
        return answer

    def _decode(self, body: bytes, kind: type[T]) -> T:
        try:
            return messages.decode(body, kind)
        except msgspec.DecodeError as error:
            raise EngineError(f"the answer is no {kind.__name__}: {error}") from error


async def read_limited(response: aiohttp.ClientResponse) -> bytes:
    """The body, unless it is larger than any honest answer."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > messages.MAX_BODY_BYTES:
            raise aiohttp.ClientPayloadError(f"the answer is larger than {messages.MAX_BODY_BYTES} bytes")
    return bytes(body)


def open_session() -> aiohttp.ClientSession:
    """One session for all engines; requests in flight are limited by the pool, not by connections."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar())
