"""The server base: what every server here gets for free."""

import asyncio
import logging
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from polyrhythm import messages
from polyrhythm.errors import UserError
from polyrhythm.http import server as server_module
from polyrhythm.http.credentials import Credentials
from polyrhythm.http.errors import Refusal
from polyrhythm.http.listener import Listener
from polyrhythm.http.server import PUBLIC, HttpServer, packed, read_message

CREDENTIALS = Credentials({"read": "read-secret", "admin": "admin-secret"})


class Busy(Refusal):
    status = 409


async def say_ok(_: web.Request) -> web.Response:
    return web.Response(text="ok")


async def echo(request: web.Request) -> web.Response:
    return packed(await read_message(request, messages.EngineName))


async def refuse(_: web.Request) -> web.Response:
    raise Busy("busy with\nsomething else")


async def fail(_: web.Request) -> web.Response:
    raise KeyError("internal detail")


async def wait(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return web.Response()


def make(**options) -> HttpServer:
    server = HttpServer(CREDENTIALS, shutdown_deadline_s=0.1, **options)
    server.add(PUBLIC, [web.get("/health", say_ok)])
    server.add("read", [web.post("/echo", echo), web.get("/refuse", refuse), web.get("/fail", fail)])
    server.add("admin", [web.get("/secret", say_ok), web.get("/wait", wait), web.post("/admin/echo", echo)])
    return server


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with Listener("127.0.0.1", 0) as listener, make().serving(listener) as url:
        yield url


async def ask(url: str, method: str, path: str, secret: str = "", body: bytes = b"", kind=messages.CONTENT_TYPE):
    headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {secret}"} if secret else {})
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.request(method, url + path, data=body) as reply:
            return reply.status, (await reply.read()).decode(errors="replace")


async def test_each_scope_opens_its_routes_and_admin_opens_all(url):
    body = messages.encode(messages.EngineName("x"))
    assert (await ask(url, "POST", "/echo", "read-secret", body))[0] == 200
    assert (await ask(url, "POST", "/echo", "admin-secret", body))[0] == 200
    assert await ask(url, "POST", "/admin/echo", "read-secret", body) == (403, "this token does not allow admin")
    for secret in ("", "wrong", "read-secre", "read-secretx", "Bearer read-secret", "rëad"):
        assert await ask(url, "POST", "/echo", secret, body) == (401, "a token is needed")


async def test_public_routes_need_nothing_and_unknown_ones_are_not_told_to_strangers(url):
    assert await ask(url, "GET", "/health") == (200, "ok")
    assert (await ask(url, "GET", "/nothing"))[0] == 401
    assert (await ask(url, "GET", "/nothing", "read-secret"))[0] == 404


async def test_a_route_asks_the_same_credential_for_its_head(url):
    assert (await ask(url, "HEAD", "/health"))[0] == 200
    assert (await ask(url, "HEAD", "/secret"))[0] == 401
    assert (await ask(url, "HEAD", "/secret", "read-secret"))[0] == 403
    assert (await ask(url, "HEAD", "/secret", "admin-secret"))[0] == 200


async def test_strangers_do_not_learn_by_another_method_which_paths_there_are(url):
    for path in ("/echo", "/secret", "/nothing"):
        assert await ask(url, "DELETE", path) == (401, "a token is needed")
    assert (await ask(url, "DELETE", "/echo", "read-secret"))[0] == 405


async def test_a_scope_can_be_open_to_anybody_and_the_others_stay_closed():
    async with Listener("127.0.0.1", 0) as listener, make(open_scopes={"read"}).serving(listener) as url:
        assert (await ask(url, "POST", "/echo", body=messages.encode(messages.EngineName("x"))))[0] == 200
        for method in ("GET", "HEAD"):
            assert (await ask(url, method, "/secret"))[0] == 401
        assert (await ask(url, "DELETE", "/echo"))[0] == 405
        assert (await ask(url, "GET", "/nothing"))[0] == 404


async def test_what_is_expected_is_said_in_one_line_and_what_is_not_stays_in_the_log(url, caplog):
    assert await ask(url, "GET", "/refuse", "read-secret") == (409, "busy with something else")
    assert not caplog.records
    with caplog.at_level(logging.ERROR):
        status, text = await ask(url, "GET", "/fail", "read-secret")
    assert status == 500 and "internal detail" not in text and "\n" not in text
    assert "internal detail" in caplog.text and "GET /fail failed" in caplog.text


async def test_bodies_of_another_type_or_shape_or_size_are_refused(monkeypatch):
    monkeypatch.setattr(messages, "MAX_BODY_BYTES", 1000)
    async with Listener("127.0.0.1", 0) as listener, make().serving(listener) as url:
        good = messages.encode(messages.EngineName("x"))
        assert await ask(url, "POST", "/echo", "read-secret", good, "text/plain") == (415, "send application/msgpack")
        status, text = await ask(url, "POST", "/echo", "read-secret", b"\xc1")
        assert status == 400 and text.startswith("malformed request: ")
        assert (await ask(url, "POST", "/echo", "read-secret", b"x" * 1001))[0] == 413


async def test_a_body_that_comes_too_slowly_is_not_waited_for(url, monkeypatch):
    monkeypatch.setattr(server_module, "BODY_DEADLINE_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    writer.write(
        b"POST /echo HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer read-secret\r\n"
        b"Content-Type: application/msgpack\r\nContent-Length: 100\r\n\r\n\x81"
    )
    async with asyncio.timeout(10):
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    writer.close()


async def test_leaving_ends_requests_that_would_take_long_and_closes_the_door():
    async with Listener("127.0.0.1", 0) as listener, make().serving(listener) as url:
        waiting = asyncio.create_task(ask(url, "GET", "/wait", "admin-secret"))
        await asyncio.sleep(0.1)
    async with asyncio.timeout(10):
        with pytest.raises(aiohttp.ClientError):
            await waiting
        with pytest.raises(aiohttp.ClientError):
            await ask(url, "GET", "/health")


async def test_a_server_at_all_addresses_is_called_by_its_loopback_address():
    async with Listener("0.0.0.0", 0) as listener, make().serving(listener) as url:
        assert url.startswith("http://127.0.0.1:")


async def test_an_address_that_is_taken_is_said_with_the_keys_that_chose_it():
    async with Listener("127.0.0.1", 0) as first:
        port = int((await first.open(asyncio.Protocol)).rsplit(":", 1)[1])
        with pytest.raises(UserError, match=r"cannot listen at .*\(see conductor.host, conductor.port\)"):
            async with Listener("127.0.0.1", port, keys="conductor.host, conductor.port"):
                pass
