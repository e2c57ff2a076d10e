"""The client of a vLLM server, on a unix socket or at an address: JSON both ways, every call with a deadline."""

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from polyrhythm.http.errors import AnswerTooLarge, DeadlinePassed, ErrorReply, NoAnswer
from polyrhythm.messages import MAX_BODY_BYTES

PEER = "vLLM"
_TOKENS_METRIC = re.compile(rb"^vllm:generation_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class VllmClient:
    """Raises `CallFailed`. `async with` closes its connections."""

    def __init__(self, *, socket: Path | None = None, url: str = ""):
        self._url = url.rstrip("/") or "http://vllm"
        connector = aiohttp.UnixConnector(str(socket), limit=0) if socket else aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())

    async def __aenter__(self) -> "VllmClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str, *, deadline_s: float) -> bytes:
        return await self._call("GET", path, None, deadline_s)

    async def post(self, path: str, body: Any = None, *, deadline_s: float) -> Any:
        """What the answer's JSON says; None if it says nothing."""
        content = await self._call("POST", path, body, deadline_s)
        try:
            return msgspec.json.decode(content) if content else None
        except msgspec.DecodeError as error:
            raise NoAnswer(f"{PEER} answered POST {path} with something that is no JSON: {error}") from error

    async def num_tokens_generated(self, *, deadline_s: float) -> int:
        """Since the server was started, all requests together; it moves while requests run."""
        counts = _TOKENS_METRIC.findall(await self.get("/metrics", deadline_s=deadline_s))
        if not counts:
            raise NoAnswer(f"{PEER} has no metric vllm:generation_tokens_total: start it without --disable-log-stats")
        return int(sum(map(float, counts)))

    async def _call(self, method: str, path: str, body: Any, deadline_s: float) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if data is None else {"Content-Type": "application/json"}
        content = bytearray()
        try:
            async with asyncio.timeout(deadline_s):
                async with self._session.request(
                    method, self._url + path, data=data, headers=headers, allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as response:  # fmt: skip
                    async for piece in response.content.iter_any():
                        content += piece
                        if len(content) > MAX_BODY_BYTES:
                            raise AnswerTooLarge(
                                f"{PEER} answered {method} {path} with more than {MAX_BODY_BYTES} bytes"
                            )
        except TimeoutError:
            raise DeadlinePassed(f"{PEER} did not answer {method} {path} within {deadline_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NoAnswer(f"{PEER} cannot be reached by {method} {path}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise ErrorReply(PEER, response.status, bytes(content))
        return bytes(content)
