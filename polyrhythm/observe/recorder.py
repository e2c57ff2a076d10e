"""The recorder of one process: notes what it does, and tells who watches from a thread of its own."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from polyrhythm.observe.activity import Activity, ActivityReport, Span

SPANS_INTERVAL_S = 0.5
"""A new activity is reported at once, finished spans at least this often."""
RETRY_PAUSE_S = 1.0
MAX_UNSENT_SPANS = 2000

log = logging.getLogger(__name__)


class ActivityHook(Protocol):
    """Somebody who acts at the moments of a process. What a hook raises ends the activity, as a fault by plan must."""

    def before(self, activity: Activity) -> None: ...

    def after(self, activity: Activity) -> None:
        """The activity has ended well."""
        ...


class ActivityRecorder:
    """`with recorder.doing(Activity.PUBLISH):` records a span.

    Recording is local and costs microseconds. `send` is called by a daemon thread: whatever it does, be slow, fail or
    never return, the process that records notices nothing of it.
    """

    def __init__(
        self,
        process: str,
        send: Callable[[ActivityReport], None] | None = None,
        hooks: Sequence[ActivityHook] = (),
    ):
        self.process = process
        self._hooks = hooks
        self._seconds: dict[Activity, float] = {}
        self._lock = threading.Lock()
        self._reporter = _Reporter(process, send) if send else None

    @contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        for hook in self._hooks:
            hook.before(activity)
        if self._reporter:
            self._reporter.begins(activity)
        start_s, started = time.time(), time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            with self._lock:
                self._seconds[activity] = self._seconds.get(activity, 0.0) + seconds
            if self._reporter:
                self._reporter.has_done(Span(self.process, activity, start_s, start_s + seconds))
        for hook in self._hooks:
            hook.after(activity)

    def moment(self, activity: Activity) -> None:
        """A point in the middle of an activity at which hooks may act."""
        for hook in self._hooks:
            hook.before(activity)

    def seconds(self, activity: Activity) -> float:
        """Seconds spent in an activity since the last `take_seconds`."""
        with self._lock:
            return self._seconds.get(activity, 0.0)

    def take_seconds(self) -> dict[Activity, float]:
        """Seconds per activity since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds


class _Reporter:
    """Consumes what a recorder notes, produces reports in that order; waits for a new activity, or for the next round.

    Who cannot be reached misses what happened meanwhile, and gets the newest state as soon as there is an answer again.
    """

    def __init__(self, process: str, send: Callable[[ActivityReport], None]):
        self._process = process
        self._send = send
        self._lock = threading.Lock()
        self._is_new = threading.Event()
        self._doing: Activity | None = None
        self._told: Activity | None = None
        self._spans: deque[Span] = deque(maxlen=MAX_UNSENT_SPANS)
        threading.Thread(target=self._run, name="activity reports", daemon=True).start()

    def begins(self, activity: Activity) -> None:
        with self._lock:
            self._doing = activity
            if activity is not self._told:
                self._is_new.set()

    def has_done(self, span: Span) -> None:
        with self._lock:
            self._spans.append(span)

    def _run(self) -> None:
        is_heard = True
        while True:
            self._is_new.wait(SPANS_INTERVAL_S)
            report = self._take()
            if report is None:
                continue
            try:
                self._send(report)
                is_heard = True
            except Exception as error:  # whoever watches must never end a run
                if is_heard:
                    log.warning("nobody hears what %s does: %s", self._process, error)
                is_heard = False
                self._forget_what_was_told()
                time.sleep(RETRY_PAUSE_S)

    def _forget_what_was_told(self) -> None:
        with self._lock:
            self._told = None

    def _take(self) -> ActivityReport | None:
        with self._lock:
            self._is_new.clear()
            if self._doing is None or (self._doing is self._told and not self._spans):
                return None
            spans = list(self._spans)
            self._spans.clear()
            self._told = self._doing
            return ActivityReport(self._process, self._doing, spans)
