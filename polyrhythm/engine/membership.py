"""An engine's place in a run: it joins, says that it is alive, and leaves when it is told to or nobody answers."""

import asyncio
import logging
import time

import aiohttp

from polyrhythm import messages
from polyrhythm.errors import RunError

JOIN_DEADLINE_S = 30.0
CALL_DEADLINE_S = 10.0
RETRY_S = 0.5
BEATS_PER_LEASE = 3
UNKNOWN, DISMISSED = 409, 410

log = logging.getLogger(__name__)


async def stay_in_run(url: str, me: messages.JoinRequest, token: str, lease_s: float) -> None:
    """Returns when the run lets this engine go; RunError when the conductor was out of reach for the whole lease."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": messages.CONTENT_TYPE}
    timeout = aiohttp.ClientTimeout(total=min(CALL_DEADLINE_S, lease_s))
    is_member, patience_s, heard_s = False, JOIN_DEADLINE_S, time.monotonic()
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        while True:
            path = "/engines/heartbeat" if is_member else "/engines/join"
            status, said = await _call(session, url + path, me)
            if status == DISMISSED:
                log.warning("%s leaves %s: %s", me.name, url, said)
                return
            if status == 200:
                is_member, patience_s, heard_s = True, lease_s, time.monotonic()
                await asyncio.sleep(lease_s / BEATS_PER_LEASE)
                continue
            if status == UNKNOWN and is_member:
                is_member = False  # it was out of reach for too long: join again
                continue
            if time.monotonic() - heard_s > patience_s:
                did = "lost" if is_member else "could not join"
                raise RunError(f"engine {me.name} {did} {url}: {said}")
            await asyncio.sleep(RETRY_S)


async def _call(session: aiohttp.ClientSession, url: str, me: messages.JoinRequest) -> tuple[int, str]:
    """Status and text of the answer; status 0 if there is none."""
    try:
        async with session.post(url, data=messages.encode(me), allow_redirects=False) as reply:
            text = (await reply.content.read(200)).decode(errors="replace")
            return reply.status, text if reply.status < 300 else f"status {reply.status}: {text}"
    except TimeoutError:
        return 0, "no answer"
    except aiohttp.ClientError as error:
        return 0, str(error)
