"""What the conductor says to an engine, over HTTP. Every call has a deadline and fails as EngineError."""

from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec

from polyrhythm import messages
from polyrhythm.http.async_client import AsyncClient
from polyrhythm.http.credentials import Credentials
from polyrhythm.http.errors import ErrorReply, NoAnswer
from polyrhythm.messages import EngineStatus, GenerateReply, GenerateRequest, LoadRequest, Meeting, ThreadsRequest

WRONG_REQUEST = (400, 413, 422)
WRONG_VERSION = 409

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

    async def load(self, version: int, deadline_s: float, meeting: Meeting | None = None) -> None: ...

    async def status(self, deadline_s: float) -> EngineStatus: ...

    async def set_threads(self, num_threads: int, deadline_s: float) -> None: ...


class HttpEngineClient:
    """The routes that every kind of engine serves, msgpack both ways."""

    def __init__(self, session: aiohttp.ClientSession, url: str, credentials: Credentials):
        self._client = AsyncClient(session, url, peer=f"the engine at {url}")
        self._credentials = credentials

    async def generate(self, request: GenerateRequest, deadline_s: float) -> GenerateReply:
        return _decode(await self._call("POST", "/generate", "generate", deadline_s, request), GenerateReply)

    async def load(self, version: int, deadline_s: float, meeting: Meeting | None = None) -> None:
        await self._call("POST", "/weights/load", "admin", deadline_s, LoadRequest(version, meeting))

    async def status(self, deadline_s: float) -> EngineStatus:
        return _decode(await self._call("GET", "/status", "admin", deadline_s), EngineStatus)

    async def set_threads(self, num_threads: int, deadline_s: float) -> None:
        await self._call("POST", "/threads", "admin", deadline_s, ThreadsRequest(num_threads))

    async def _call(self, method: str, path: str, scope: str, deadline_s: float, message: Any = None) -> bytes:
        credential = self._credentials[scope]
        try:
            return await self._client.call(method, path, message, credential=credential, deadline_s=deadline_s)
        except NoAnswer as error:
            raise EngineError(str(error)) from error
        except ErrorReply as error:
            raise EngineError(
                f"{method} {path}: {error}",
                refused=error.status in WRONG_REQUEST,
                wrong_version=error.status == WRONG_VERSION,
            ) from error


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return messages.decode(body, kind)
    except msgspec.DecodeError as error:
        raise EngineError(f"the answer is no {kind.__name__}: {error}") from error
