"""A lane: what one process is doing, moment by moment, for the live view and the timeline."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from polyrhythm.messages import Span, TrainerReport


class Lane:
    """`with lane.doing("publish"):` records a span, and tells `send` what is being done now."""

    def __init__(self, name: str, send: Callable[[TrainerReport], None] | None = None):
        self.name = name
        self.send = send
        self.finished: list[Span] = []
        self.seconds: dict[str, float] = {}

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        self._report(what)
        start_s = time.time()
        try:
            yield
        finally:
            end_s = time.time()
            self.seconds[what] = self.seconds.get(what, 0.0) + end_s - start_s
            if self.send:
                self.finished.append(Span(lane=self.name, what=what, start_s=start_s, end_s=end_s))

    def take_seconds(self) -> dict[str, float]:
        """Seconds per activity since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    def _report(self, what: str) -> None:
        if self.send:
            self.send(TrainerReport(doing=what, spans=self.finished, lane=self.name))
            self.finished = []
