"""An engine's place in a run, with a conductor that answers as it is told."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polyrhythm import messages
from polyrhythm.engine import membership
from polyrhythm.engine.membership import stay_in_run
from polyrhythm.errors import RunError, UserError

SETUP = messages.Setup("1.2.3", "4.5.6", {})
ME = messages.JoinRequest("e0", "http://127.0.0.1:1", messages.Capabilities(8, True, True, False), SETUP)


class ScriptedConductor:
    """Takes one status after the other from `answers`; the last one stays."""

    def __init__(self) -> None:
        self.answers = [200]
        self.events: list[str] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        assert messages.decode(await request.read(), messages.JoinRequest) == ME
        assert request.headers["Authorization"] == "Bearer secret"
        status = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.events.append(f"{request.path.rsplit('/')[-1]} {status}")
        return web.Response(status=status, text="said the conductor")

    async def stay(self, lease_s: float = 0.3) -> None:
        await asyncio.wait_for(stay_in_run(self.url, ME, "secret", lease_s), 10)


@pytest.fixture
async def conductor(monkeypatch) -> AsyncIterator[ScriptedConductor]:
    monkeypatch.setattr(membership, "RETRY_S", 0.02)
    monkeypatch.setattr(membership, "JOIN_DEADLINE_S", 0.3)
    conductor = ScriptedConductor()
    app = web.Application()
    app.router.add_post("/engines/{what}", conductor.handle)
    async with TestServer(app) as server:
        conductor.url = str(server.make_url("")).rstrip("/")
        yield conductor


async def test_it_joins_beats_and_leaves_when_it_is_let_go(conductor):
    conductor.answers = [200, 200, 200, 410]
    await conductor.stay()
    assert conductor.events == ["join 200", "heartbeat 200", "heartbeat 200", "heartbeat 410"]


async def test_beats_are_a_third_of_the_lease_apart(conductor):
    staying = asyncio.create_task(conductor.stay(lease_s=30))
    async with asyncio.timeout(5):
        while not conductor.events:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    staying.cancel()
    assert conductor.events == ["join 200"]


async def test_an_engine_that_was_given_up_joins_again(conductor):
    conductor.answers = [200, 409, 200, 200, 410]
    await conductor.stay()
    assert conductor.events == ["join 200", "heartbeat 409", "join 200", "heartbeat 200", "heartbeat 410"]


async def test_a_conductor_that_fails_for_a_moment_is_asked_again(conductor):
    conductor.answers = [503, 200, 500, 200, 410]
    await conductor.stay()
    assert conductor.events[-2:] == ["heartbeat 200", "heartbeat 410"]


@pytest.mark.parametrize("status", [401, 409, 500])
async def test_an_engine_that_is_refused_all_the_time_gives_up_and_says_why(conductor, status):
    conductor.answers = [status]
    with pytest.raises(RunError, match=f"e0 could not join .*status {status}: said the conductor"):
        await conductor.stay()


async def test_an_engine_that_does_not_fit_the_run_ends_at_once_as_a_mistake(conductor):
    conductor.answers = [412]
    with pytest.raises(UserError, match=r"^said the conductor$"):
        await conductor.stay()
    assert conductor.events == ["join 412"]


async def test_an_engine_whose_conductor_stays_away_for_the_lease_ends(conductor):
    conductor.answers = [200, 500]
    with pytest.raises(RunError, match=r"engine e0 lost .*status 500"):
        await conductor.stay()


async def test_an_engine_ends_when_nobody_listens(conductor):
    conductor.url = "http://127.0.0.1:9"
    with pytest.raises(RunError, match=r"engine e0 could not join http://127\.0\.0\.1:9"):
        await conductor.stay()
