"""A logger in a thread of its own: a run tells it something without waiting, and loses it without noticing.

consumes     what the conductor says about each step, from a bounded queue
produces     whatever the logger writes or sends
waits for    the next step; a full queue drops what comes, and counts it
dropped by   a call that raises, or one that has not returned within the deadline: one warning, and the run goes on
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from polyrhythm.observe.loggers.logger import Logger

QUEUE_SIZE = 256
"""Calls that may wait: two for each step."""
OPEN_DEADLINE_S = 120.0
"""To import the library and reach its service."""
CALL_DEADLINE_S = 60.0

log = logging.getLogger(__name__)

_Call = Callable[[Logger], None]


class BackgroundLogger:
    """Makes and calls a logger in a daemon thread. No method of this raises, and only `close` waits."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Logger],
        *,
        queue_size: int = QUEUE_SIZE,
        open_deadline_s: float = OPEN_DEADLINE_S,
        call_deadline_s: float = CALL_DEADLINE_S,
    ) -> None:
        self._name = name
        self._make = make
        self._call_deadline_s = call_deadline_s
        self._inbox: queue.Queue[_Call | None] = queue.Queue(queue_size)
        self._due = time.monotonic() + open_deadline_s
        """When the call that is made now must have returned; infinite between calls."""
        self._is_closing = threading.Event()
        self._is_dropped = False
        self._num_lost = 0
        self._warning = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._tell(lambda logger: logger.log(step, metrics))

    def log_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        self._tell(lambda logger: logger.log_samples(step, samples))

    def begin_close(self) -> None:
        """Nothing more will be told; what is in the queue is still to be logged."""
        self._is_closing.set()
        with contextlib.suppress(queue.Full):  # then the thread is awake anyway, and sees the event
            self._inbox.put_nowait(None)

    def close(self, deadline_s: float) -> None:
        """Wait until everything is logged and the logger is closed, but no longer than this."""
        self.begin_close()
        if not self._is_dropped:
            self._thread.join(timeout=deadline_s)
        if self._thread.is_alive():
            self._drop(f"has not closed within {deadline_s:.0f} s: what it had not logged by then is lost")
        if self._num_lost:
            log.warning("logger %s: %d calls were dropped in all", self._name, self._num_lost)

    def _tell(self, call: _Call) -> None:
        if not self._is_dropped and time.monotonic() > self._due:
            self._drop("does not return from a call: it is dropped, and the run goes on without it")
        if self._is_dropped:
            return
        try:
            self._inbox.put_nowait(call)
        except queue.Full:
            if self._num_lost == 0:
                log.warning(
                    "logger %s is too slow: its queue of %d calls is full, and values are dropped until there is room; "
                    "metrics.jsonl has them all", self._name, self._inbox.maxsize,
                )  # fmt: skip
            self._num_lost += 1

    def _drop(self, why: str, is_raised: bool = False) -> None:
        with self._warning:
            if not self._is_dropped:
                self._is_dropped = True
                log.warning("logger %s %s", self._name, why, exc_info=is_raised)

    def _work(self) -> None:
        logger = None
        try:
            logger = self._make()
            while (call := self._next()) is not None and not self._is_dropped:
                self._due = time.monotonic() + self._call_deadline_s
                call(logger)
            self._due = time.monotonic() + self._call_deadline_s
            logger.close()
        # A logger may be anybody's code, and may even leave by SystemExit.
        except BaseException:
            self._drop("failed: it is dropped, and the run goes on without it", is_raised=True)
            if logger is not None:
                with contextlib.suppress(BaseException):  # its first failure was told
                    logger.close()

    def _next(self) -> _Call | None:
        """The next call, in order; None when there are no more."""
        self._due = float("inf")
        if self._is_closing.is_set():
            with contextlib.suppress(queue.Empty):
                return self._inbox.get_nowait()
            return None
        return self._inbox.get()
