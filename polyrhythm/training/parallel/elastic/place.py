"""The place of an elastic rank in its run: what it says to the conductor, and the thread that says that it is alive."""

import logging
import threading
import time
from typing import Any, TypeVar

from polyrhythm import messages
from polyrhythm.errors import AnotherFailed, LetGo, RunError
from polyrhythm.http.client import BlockingClient
from polyrhythm.http.errors import ErrorReply, NoAnswer
from polyrhythm.training.parallel.meeting import MEMBER

POLL_S = 20.0
GRACE_S = 30.0
RETRY_S = 0.5
BEATS_PER_LEASE = 3
DISMISSED, RUN_FAILED = 410, 503

T = TypeVar("T")
log = logging.getLogger(__name__)


class ElasticPlace:
    """Calls of one rank. `member` is the name of this process, which no other process of the rank's name has.

    Whoever asks waits as long as the conductor does: it judges whether anything still happens, and ends the run if not.
    """

    def __init__(self, url: str, credential: str, name: str, lease_s: float):
        self.name = name
        self.member = MEMBER
        self.is_first = False
        """It speaks for all, as far as is known."""
        self._url, self._credential = url, credential
        self._client = self._new_client()
        self._lease_s = lease_s
        self._ended_epoch = 0
        self._over: RunError | None = None

    def join(self, setup: messages.Setup) -> None:
        """A run admits only who is made of the same as itself."""
        message = messages.RankJoin(self.name, self.member, 0.0, setup=setup)
        self._call(self._client, "/ranks/join", message, dict)
        threading.Thread(target=self._stay, name="rank lease", daemon=True).start()

    def enter(self, holds: int, has_state: bool) -> messages.RankEntry:
        """What to do before this rank takes part, or that it does."""
        message = messages.RankEnter(self.member, holds, has_state, POLL_S)
        return self._ask("/ranks/enter", message, messages.RankEntry)

    def ready(self, positions: list[int], said: bytes) -> messages.RankDecision:
        """Until everybody is ready, or there is more to train on."""
        message = messages.RankReady(self.member, positions, said, POLL_S)
        return self._ask("/ranks/ready", message, messages.RankDecision)

    def reduced(self, epoch: int, digest: str) -> bool:
        """Whether the sum of this epoch is the update."""
        message = messages.RankReduced(self.member, epoch, digest, POLL_S)
        return self._ask("/ranks/reduced", message, messages.RankVerdict).what == "commit"

    def failed(self, epoch: int, cause: str) -> None:
        self._call(self._client, "/ranks/failed", messages.RankFailed(self.member, epoch, cause), dict)

    def has_duty(self, duty: str) -> bool:
        """Whether this rank does it for all. If another does, until that one has done it or is lost."""
        message = messages.RankDuty(self.member, duty, wait_s=POLL_S)
        return self._ask("/ranks/duty", message, messages.RankDutyReply).what == "yours"

    def has_done(self, duty: str) -> None:
        self._call(self._client, "/ranks/duty", messages.RankDuty(self.member, duty, is_done=True), dict)

    def check(self, epoch: int) -> None:
        """Raise why adding up in this epoch has no future."""
        if self._over is not None:
            raise self._over
        if self._ended_epoch >= epoch:
            raise EpochEnded(f"epoch {epoch} has ended")

    def _stay(self) -> None:
        """Says that this rank is alive; hears that an epoch has ended, or that the run goes on without this rank."""
        client, heard_s = self._new_client(), time.monotonic()
        while True:
            message = messages.RankStay(self.member, self._ended_epoch, self._lease_s / BEATS_PER_LEASE)
            try:
                news = self._call(client, "/ranks/stay", message, messages.RankNews)
                self._ended_epoch, self.is_first, heard_s = news.ended_epoch, news.is_first, time.monotonic()
            except AnotherFailed as error:
                if time.monotonic() - heard_s > self._lease_s:
                    self._over = error
                    return
                time.sleep(RETRY_S)
            except RunError as error:
                self._over = error
                return

    def _ask(self, path: str, message: Any, kind: type[T]) -> T:
        while (answer := self._call(self._client, path, message, kind)).what == "wait":  # pyright: ignore
            pass
        return answer

    def _call(self, client: BlockingClient, path: str, message: Any, kind: type[T]) -> T:
        try:
            answer = client.call("POST", path, message, deadline_s=POLL_S + GRACE_S, is_idempotent=True)
            return messages.decode(answer, kind)
        except NoAnswer as error:
            raise AnotherFailed(str(error)) from None
        except ErrorReply as error:
            failed = {DISMISSED: LetGo, RUN_FAILED: AnotherFailed}.get(error.status, RunError)
            raise failed(str(error)) from None

    def _new_client(self) -> BlockingClient:
        return BlockingClient(self._url, self._credential, peer="the conductor")


class EpochEnded(Exception):
    """The members of an epoch do not add up any more: one of them is lost, or has failed."""
