"""The trainer's line to the conductor: blocking HTTP, one kept connection, a deadline on every request."""

from typing import Any

from polyrhythm import messages
from polyrhythm.errors import AnotherFailed, LetGo, RunError
from polyrhythm.http.client import BlockingClient
from polyrhythm.http.errors import ErrorReply, NoAnswer
from polyrhythm.observe.activity import ActivityReport

LONG_POLL_S = 20.0
GRACE_S = 30.0
REPORT_DEADLINE_S = 5.0
FIRST_RANK_S = 86_400.0
"""The others wait while the first rank publishes weights. The conductor judges whether anything still happens."""
DISMISSED, RUN_FAILED = 410, 503


class ConductorClient:
    """Sends `messages` and returns the decoded answers; trouble is a RunError that says whose."""

    def __init__(self, url: str, credential: str, rank: int | str = 0):
        self._rank = rank
        self._client = BlockingClient(url, credential, peer="the conductor")

    def published(self, version: int, metrics: dict[str, float]) -> None:
        """Say that weights `version` are in the store, and what was measured in the step that made them."""
        self._call("POST", "/weights/published", messages.Published(version=version, metrics=metrics), GRACE_S)

    def wait_for_engines(self, version: int, deadline_s: float) -> None:
        """Until engines hold `version` and its step has begun."""
        if self._rank != 0:
            deadline_s += FIRST_RANK_S
        self._call("GET", f"/steps/{version}/ready?rank={self._rank}", None, deadline_s)

    def groups(self, version: int, offset: int, until: int, wait_s: float) -> messages.GroupsReply:
        path = f"/steps/{version}/groups?offset={offset}&until={until}&rank={self._rank}&wait_s={wait_s}"
        return messages.decode(self._call("GET", path, None, wait_s + GRACE_S), messages.GroupsReply)

    def next_broadcast(self, after: int) -> messages.Meeting | None:
        """Where engines wait to be sent a version above `after`; None if none do for now."""
        path = f"/weights/broadcast?after={after}&wait_s={LONG_POLL_S}"
        return messages.decode(self._call("GET", path, None, LONG_POLL_S + GRACE_S), messages.Meeting | None)  # pyright: ignore

    def report(self, report: ActivityReport) -> None:
        self._call("POST", "/trainer/report", report, REPORT_DEADLINE_S)

    def threads(self, known: int) -> int:
        """How many threads the conductor wants the trainer to use, as soon as that is not the known number."""
        path = f"/trainer/threads?known={known}&wait_s={LONG_POLL_S}"
        return messages.decode(
            self._call("GET", path, None, LONG_POLL_S + GRACE_S), messages.ThreadsRequest
        ).num_threads

    def close(self) -> None:
        self._client.close()

    def _call(self, method: str, path: str, message: Any, deadline_s: float) -> bytes:
        try:
            # The conductor takes every message twice without harm.
            return self._client.call(method, path, message, deadline_s=deadline_s, is_idempotent=True)
        except NoAnswer as error:
            raise AnotherFailed(str(error)) from None
        except ErrorReply as error:
            failed = {DISMISSED: LetGo, RUN_FAILED: AnotherFailed}.get(error.status, RunError)
            raise failed(str(error)) from None
