"""The first rank sends new weights to the engines that the conductor names, while training goes on.

What is sent is the snapshot that was just published: it does not change, so nothing waits for the sender, and the
receivers know its digests. Who misses a broadcast reads the snapshot.
"""

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from polyrhythm.errors import RunError
from polyrhythm.messages import Meeting
from polyrhythm.training.parallel.meeting import ConductorLine, ConductorStore, interface_to
from polyrhythm.weights.store import WeightStore

PATH = "/weights/rendezvous"
PIECE_BYTES = 2**25
"""Receivers divide a version in the same way."""
ROLE_TICK_S = 1.0
MEET_SHARE = 0.5
"""Of the deadline; the rest is for the weights themselves."""

log = logging.getLogger(__name__)


class WeightSender:
    """`next_meeting` waits for the conductor to say where a version above the given one is awaited.

    Whether this rank `is_writer` may change while it runs.
    """

    def __init__(
        self,
        line: ConductorLine,
        next_meeting: Callable[[int], Meeting | None],
        store: WeightStore,
        is_writer: Callable[[], bool] = lambda: True,
    ):
        self._line = line
        self._is_writer = is_writer
        self._next_meeting = next_meeting
        self._store = store

    def follow(self) -> None:
        threading.Thread(target=self._send_all, name="weights", daemon=True).start()

    def _send_all(self) -> None:
        """Consumes meetings, produces broadcasts; waits for the next version, ends with the run."""
        version = 0  # which is never sent: nobody has held a version before it
        try:
            while True:
                if not self._is_writer():
                    time.sleep(ROLE_TICK_S)
                elif (meeting := self._next_meeting(version)) is not None:
                    version = meeting.version
                    self._try_to_send(meeting)
        except RunError as error:  # the loader hears of the same trouble and says so
            log.info("no more weights are sent: %s", error)

    def _try_to_send(self, meeting: Meeting) -> None:
        try:
            self.send(meeting)
        except (RuntimeError, RunError) as error:
            log.warning("weights v%d were not sent, engines read the store: %s", meeting.version, error)

    def send(self, meeting: Meeting) -> None:
        """Meet the receivers and send them a version; RuntimeError if not all of them could be reached in time."""
        until_s = time.monotonic() + meeting.deadline_s
        meet = timedelta(seconds=meeting.deadline_s * MEET_SHARE)
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore
        options._devices = [dist.ProcessGroupGloo.create_device(interface=interface_to(self._line.url))]
        options._timeout = meet
        store = ConductorStore(self._line, meeting.number, meet, PATH)
        group = dist.ProcessGroupGloo(store, meeting.member, meeting.num_members, options)
        from_us = dist.BroadcastOptions()
        from_us.rootRank = from_us.rootTensor = 0
        for piece in self._store.contents(meeting.version, PIECE_BYTES):
            left_s = max(until_s - time.monotonic(), 0.001)
            group.broadcast([piece], from_us).wait(timeout=timedelta(seconds=left_s))  # pyright: ignore
