"""Who says nothing, or nothing that counts, is not kept waiting at the door."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from polyrhythm.http.guard import ConnectionGuard


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A server whose guard knows the path /known and has little patience."""
    guard = ConnectionGuard(patience_s=0.2)

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/known":
            guard.admit(request)
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with guard.watching(runner.server):
            yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(1):
            while await reader.read(1000):
                pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    "sent", [b"", b"GET /known HTTP/1.1\r\nHost: x\r\n", b"GET /unknown HTTP/1.1\r\nHost: x\r\n\r\n"]
)
async def test_a_connection_without_a_request_that_may_pass_is_closed(port, sent):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    assert await is_closed(reader)
    writer.close()


async def test_a_connection_on_which_a_token_was_shown_stays(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /known HTTP/1.1\r\nHost: x\r\n\r\n")
    assert not await is_closed(reader)
    writer.close()
