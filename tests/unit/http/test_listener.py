import asyncio
import socket

import pytest

from polyrhythm.errors import UserError
from polyrhythm.http.listener import Listener


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


HOSTS = ["127.0.0.1", "localhost", *(["::1"] if has_ipv6() else [])]


def free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("host", HOSTS)
async def test_connections_are_refused_until_it_is_opened_and_after_it_was_closed(host: str):
    port = free_port(host)
    async with Listener(host, port) as listener:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port), 5)
        in_url = f"[{host}]" if ":" in host else host
        assert await listener.open(asyncio.Protocol) == f"http://{in_url}:{port}"
        socket.create_connection((host, port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), 5)


async def test_port_0_takes_a_free_port():
    async with Listener("127.0.0.1", 0) as first, Listener("127.0.0.1", 0) as second:
        assert await first.open(asyncio.Protocol) != await second.open(asyncio.Protocol)


@pytest.mark.parametrize("host", HOSTS)
async def test_a_port_in_use_is_named_at_once(host: str):
    async with Listener(host, free_port(host)) as first:
        port = int((await first.open(asyncio.Protocol)).rsplit(":", 1)[1])
        with pytest.raises(UserError, match=f"cannot listen at {host} port {port}: .*address already in use"):
            async with Listener(host, port):
                pass


async def test_of_two_that_start_together_the_second_is_told():
    port = free_port("127.0.0.1")
    async with Listener("127.0.0.1", port) as first, Listener("127.0.0.1", port) as second:
        await first.open(asyncio.Protocol)
        with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1 port {port}: Address already in use"):
            await second.open(asyncio.Protocol)


async def test_a_host_that_is_none_is_named():
    with pytest.raises(UserError, match=r"cannot listen at 192\.0\.2\.1 port 0: "):
        async with Listener("192.0.2.1", 0):
            pass
