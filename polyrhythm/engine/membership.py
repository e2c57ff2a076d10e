"""An engine's place in a run: it joins, says that it is alive, and leaves when it is told to or nobody answers."""

import asyncio
import logging
import time

from polyrhythm import messages
from polyrhythm.errors import RunError, UserError
from polyrhythm.http.async_client import AsyncClient, open_session
from polyrhythm.http.errors import ErrorReply, NoAnswer

JOIN_DEADLINE_S = 30.0
CALL_DEADLINE_S = 10.0
RETRY_S = 0.5
BEATS_PER_LEASE = 3
UNKNOWN, DISMISSED, UNFIT = 409, 410, 412

log = logging.getLogger(__name__)


async def stay_in_run(url: str, me: messages.JoinRequest, credential: str, lease_s: float) -> None:
    """Returns when the run lets this engine go; RunError when the conductor was out of reach for the whole lease."""
    deadline_s = min(CALL_DEADLINE_S, lease_s)
    is_member, patience_s, heard_s = False, JOIN_DEADLINE_S, time.monotonic()
    async with open_session() as session:
        conductor = AsyncClient(session, url, peer=f"the conductor at {url}")
        while True:
            path = "/engines/heartbeat" if is_member else "/engines/join"
            status, said = await _call(conductor, path, me, credential, deadline_s)
            if status == DISMISSED:
                log.warning("%s leaves %s: %s", me.name, url, said)
                return
            if status == UNFIT:
                raise UserError(said)
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


async def _call(
    conductor: AsyncClient, path: str, me: messages.JoinRequest, credential: str, deadline_s: float
) -> tuple[int, str]:
    """Status and text of the answer; status 0 if there is none."""
    try:
        await conductor.call("POST", path, me, credential=credential, deadline_s=deadline_s, is_idempotent=True)
        return 200, ""
    except ErrorReply as error:
        return error.status, error.said if error.status == UNFIT else f"status {error.status}: {error.said}"
    except NoAnswer as error:
        return 0, str(error)
