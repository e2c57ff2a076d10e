"""The part of a conductor at which ranks meet, served from a thread, for tests whose ranks have no run around them."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from aiohttp import web

from polyrhythm.conductor.ranks.membership import FixedMembership
from polyrhythm.conductor.ranks.rendezvous import Rendezvous
from polyrhythm.conductor.ranks.routes import RankRoutes, meeting_at
from polyrhythm.conductor.refusals import RunFailed
from polyrhythm.http.credentials import ADMIN, Credentials
from polyrhythm.http.listener import Listener
from polyrhythm.http.server import HttpServer

CREDENTIAL = "meeting-token"
DEADLINE_S = 30.0


@dataclass
class MeetingPlace:
    url: str
    membership: FixedMembership
    rendezvous: Rendezvous
    broadcasts: Rendezvous
    loop: asyncio.AbstractEventLoop
    failures: list[str]

    def fails_with(self, cause: str) -> None:
        self.failures.append(cause)


@contextmanager
def meeting_place(*names: str, host: str = "127.0.0.1", lease_s: float = 60.0) -> Iterator[MeetingPlace]:
    """Ranks of these names meet at its `url` with CREDENTIAL."""
    failures: list[str] = []

    def check() -> None:
        if failures:
            raise RunFailed(failures[0])

    rendezvous = Rendezvous(check)
    server = HttpServer(Credentials({ADMIN: CREDENTIAL}), shutdown_deadline_s=0.1)
    membership, broadcasts = FixedMembership(names, 0, rendezvous, check, lease_s=lease_s), Rendezvous()
    place = MeetingPlace("", membership, rendezvous, broadcasts, asyncio.new_event_loop(), failures)
    server.add(ADMIN, RankRoutes(place.membership, rendezvous).routes())
    server.add(ADMIN, [web.post("/weights/rendezvous", meeting_at(broadcasts))])
    ready = threading.Event()
    task: asyncio.Task | None = None

    async def serve() -> None:
        nonlocal task
        task = asyncio.current_task()
        async with Listener(host, 0) as listener, server.serving(listener) as place.url:
            ready.set()
            await asyncio.sleep(3600)

    def run() -> None:
        with suppress(asyncio.CancelledError):
            place.loop.run_until_complete(serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(DEADLINE_S)
    try:
        yield place
    finally:
        assert task is not None
        place.loop.call_soon_threadsafe(task.cancel)
        thread.join(DEADLINE_S)
        place.loop.close()
