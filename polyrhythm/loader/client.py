"""The trainer's line to the conductor: blocking HTTP, one kept connection, a deadline on every request."""

import http.client
import time
from typing import Any, TypeVar
from urllib.parse import urlsplit

from polyrhythm import messages
from polyrhythm.errors import AnotherFailed, RunError
from polyrhythm.observe.activity import ActivityReport

T = TypeVar("T")
LONG_POLL_S = 20.0
GRACE_S = 30.0
REPORT_DEADLINE_S = 5.0
FIRST_RANK_S = 86_400.0
"""The first rank publishes weights and writes checkpoints before it opens the next step; the others wait. The conductor
judges whether anything still happens."""
RUN_FAILED = 503


class ConductorClient:
    """Sends the messages of `wire` and returns the decoded answers; trouble is a RunError that says whose."""

    def __init__(self, url: str, token: str, rank: int = 0):
        self._rank = rank
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=GRACE_S)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": messages.CONTENT_TYPE}

    def open_step(self, version: int, deadline_s: float) -> None:
        if self._rank > 0:
            deadline_s += FIRST_RANK_S
        self._call("POST", "/steps/open", messages.OpenStep(version=version, rank=self._rank), deadline_s)

    def groups(self, version: int, offset: int, until: int, wait_s: float) -> messages.GroupsReply:
        path = f"/steps/{version}/groups?offset={offset}&until={until}&rank={self._rank}&wait_s={wait_s}"
        return messages.decode(self._call("GET", path, None, wait_s + GRACE_S), messages.GroupsReply)

    def commit_step(self, version: int, metrics: dict[str, float]) -> None:
        self._call("POST", "/steps/commit", messages.CommitStep(version=version, metrics=metrics), GRACE_S)

    def report(self, report: ActivityReport) -> None:
        self._call("POST", "/trainer/report", report, REPORT_DEADLINE_S)

    def threads(self, known: int) -> int:
        """How many threads the conductor wants the trainer to use, as soon as that is not the known number."""
        path = f"/trainer/threads?known={known}&wait_s={LONG_POLL_S}"
        return messages.decode(
            self._call("GET", path, None, LONG_POLL_S + GRACE_S), messages.ThreadsRequest
        ).num_threads

    def close(self) -> None:
        self._connection.close()

    def _call(self, method: str, path: str, message: Any, deadline_s: float) -> bytes:
        body = None if message is None else messages.encode(message)
        try:
            status, content = self._exchange(method, path, body, deadline_s)
        except TimeoutError:
            raise AnotherFailed(f"the conductor did not answer {method} {path} within {deadline_s:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise AnotherFailed(f"the conductor cannot be reached: {error or type(error).__name__}") from None
        if status != 200:
            failed = AnotherFailed if status == RUN_FAILED else RunError
            raise failed(f"the conductor answered {status}: {content.decode(errors='replace').strip()}")
        return content

    def _exchange(self, method: str, path: str, body: bytes | None, deadline_s: float) -> tuple[int, bytes]:
        started = time.monotonic()
        for attempt in (1, 2):
            self._connection.timeout = deadline_s
            if self._connection.sock is not None:
                self._connection.sock.settimeout(deadline_s)
            try:
                self._connection.request(method, path, body, self._headers)
                response = self._connection.getresponse()
                return response.status, response.read()
            except (ConnectionError, http.client.BadStatusLine):
                # A kept connection may have been closed while idle. Every request is idempotent, so once more is safe.
                self._connection.close()
                if attempt == 2 or time.monotonic() - started > deadline_s:
                    raise
        raise AssertionError("unreachable")
