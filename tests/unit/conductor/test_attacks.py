"""Attacks on the conductor's service: nothing is served, nothing crashes, nothing leaks."""

import asyncio

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyrhythm import messages
from polyrhythm.conductor.change import Change
from polyrhythm.conductor.engines.cores import CoreBalance, CorePlan
from polyrhythm.messages import EngineName, JoinRequest, Published
from polyrhythm.observe.activity import ActivityReport

POSTS = ["/engines/join", "/engines/heartbeat", "/engines/drain", "/engines/remove", "/weights/published"]
GETS = ["/status", "/engines", "/steps/0/ready", "/steps/0/groups"]
MESSAGES = [JoinRequest, EngineName, Published, ActivityReport]


async def assert_unharmed(stage) -> None:
    assert (await stage.call("GET", "/health"))[0] == 200
    assert stage.conductor.step is None
    assert [engine.name for engine in stage.conductor.pool.present] == ["engine-0"]
    assert not stage.run.done()


@pytest.mark.parametrize("token", ["", "wrong", "generate-token", "admin-tokenx", "Bearer admin-token", "admin-tokeñ"])
async def test_without_the_admin_token_nothing_is_served(make_stage, token):
    stage = await make_stage()
    for method, paths in (("GET", GETS), ("POST", POSTS), ("DELETE", GETS + POSTS)):
        for path in paths:
            status, body = await stage.call(method, path, {"name": "engine-0", "version": 0}, token=token)
            assert (status, body) == (401, b"a token is needed")
    for path in GETS:
        assert (await stage.call("HEAD", path, token=token))[0] == 401
    await assert_unharmed(stage)


async def test_wrong_methods_and_paths_are_refused(make_stage):
    stage = await make_stage()
    for path in POSTS:
        assert (await stage.call("GET", path))[0] == 405
    for path in GETS:
        assert (await stage.call("DELETE", path))[0] == 405
    for path in (
        "/../etc/passwd",
        "/%2e%2e/tokens.json",
        "/steps/-1/groups",
        "/steps/..%2f0/groups",
        "/steps/0x1/groups",
    ):
        assert (await stage.call("GET", path))[0] in (404, 405)
    await assert_unharmed(stage)


async def test_a_body_that_is_too_large_or_of_another_type_is_refused(make_stage, monkeypatch):
    monkeypatch.setattr(messages, "MAX_BODY_BYTES", 1000)
    stage = await make_stage()
    assert (await stage.call("POST", "/engines/drain", {"name": "x" * 2000}))[0] == 413
    headers = {"Authorization": "Bearer admin-token"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(f"{stage.url}/engines/drain", json={"name": "engine-0"}) as response:
            assert response.status == 415
    await assert_unharmed(stage)


async def test_a_client_that_sends_its_body_slowly_is_let_go(make_stage, monkeypatch):
    monkeypatch.setattr("polyrhythm.http.server.BODY_DEADLINE_S", 0.1)
    stage = await make_stage()
    host, port = stage.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /weights/published HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer admin-token\r\n"
        b"Content-Type: application/msgpack\r\nContent-Length: 100\r\n\r\n\x81"
    )
    async with asyncio.timeout(5):
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    writer.close()
    await assert_unharmed(stage)


async def test_fuzzed_bodies_are_refused_in_one_line(make_stage):
    stage = await make_stage()
    bodies: list[bytes] = []

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(st.binary(max_size=60), st.sampled_from(MESSAGES).flatmap(broken_message)))
    def collect(body: bytes) -> None:
        bodies.append(body)

    collect()
    headers = {"Authorization": "Bearer admin-token", "Content-Type": messages.CONTENT_TYPE}
    async with aiohttp.ClientSession(headers=headers) as session:
        for body in bodies:
            async with session.post(f"{stage.url}/weights/published", data=body) as response:
                text = await response.text()
                assert response.status == 400, (body, text)
                assert "\n" not in text and "Traceback" not in text and "admin-token" not in text
    await assert_unharmed(stage)


def broken_message(kind: type) -> st.SearchStrategy[bytes]:
    """The fields of a message with values of any type."""
    values = st.one_of(st.none(), st.just(0.5), st.text(max_size=5), st.lists(st.integers(-5, 2**63), max_size=3))
    fields = {field.name: values for field in msgspec.structs.fields(kind)}
    return st.fixed_dictionaries(fields).map(msgspec.msgpack.encode)


async def test_an_engine_with_a_strange_address_harms_nobody_but_itself(make_stage):
    stage = await make_stage()
    conductor = stage.conductor
    cores = CoreBalance(CorePlan(2, 1, 1), conductor.pool, lambda: conductor.trainer.whole.doing, Change())
    telling = asyncio.create_task(cores.run())
    for url in ("file:///etc/passwd", "gopher://x", "", "http://", "http://127.0.0.1:1", "http://[::1", "\x00",
                "http://a..b:80", f"http://{'a' * 70}.com", "http://x:99999"):  # fmt: skip
        await stage.call("POST", "/engines/join", stage.joining(f"strange {url}", url))
    await stage.open(0)
    assert len(await stage.all_groups(0)) == 4
    assert stage.engine_state("engine-0") == "ready"
    assert not stage.run.done() and not telling.done()
    telling.cancel()
