"""Where the metrics and samples of a run go: one kind of logger per file, listed in LOGGERS.

Flow: the conductor tells `Loggers` what a committed step measured and wrote, and that tells every logger: `jsonl`, the
record of the run, at once, and the others through a queue each, in threads of their own. Who only watches never ends or
slows a run: a logger that fails or hangs is dropped, the log says so once, and the run goes on.
"""

import importlib.util
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from polyrhythm.errors import UserError
from polyrhythm.observe.loggers.background import BackgroundLogger
from polyrhythm.observe.loggers.jsonl import JsonlLogger
from polyrhythm.observe.loggers.logger import LoggedRun, Logger
from polyrhythm.user_code import find_kind

__all__ = ["CLOSE_DEADLINE_S", "LOGGERS", "LoggedRun", "Logger", "LoggerKind", "Loggers", "find_loggers"]

CLOSE_DEADLINE_S = 30.0
"""What all loggers together have, at the end of a run, to log what is left."""

log = logging.getLogger(__name__)

LoggerKind = Callable[[LoggedRun], Logger]
LOGGERS = {
    "jsonl": "polyrhythm.observe.loggers.jsonl:JsonlLogger",
    "tensorboard": "polyrhythm.observe.loggers.tensorboard:TensorboardLogger",
    "wandb": "polyrhythm.observe.loggers.wandb:WandbLogger",
    "trackio": "polyrhythm.observe.loggers.trackio:TrackioLogger",
    "mlflow": "polyrhythm.observe.loggers.mlflow:MlflowLogger",
}
"""`module:Class` by name; each makes a logger for a run. All but jsonl are named after the package that they need."""


def find_loggers(names: Sequence[str]) -> dict[str, LoggerKind]:
    """The loggers of `observe.loggers` without jsonl, which every run has. A mistake is a UserError."""
    kinds = {}
    for name in names:
        if name in LOGGERS and name != "jsonl" and importlib.util.find_spec(name) is None:
            raise UserError(
                f"observe.loggers has {name!r}, whose package is not installed: pip install 'polyrhythm[{name}]'"
            )
        if name != "jsonl":
            kinds[name] = find_kind("observe.loggers", name, LOGGERS, "logger")
    return kinds


class Loggers:
    """All loggers of a run as one, which never raises: `with Loggers(run, kinds) as loggers: loggers.log(step, metrics)`.

    The record of a run (jsonl) is written at once; if that fails it is tried again at the next step (a full disk may have
    room by then), and the first failure is logged.
    """

    def __init__(self, run: LoggedRun, kinds: Mapping[str, LoggerKind] | None = None) -> None:
        self._has_failed = False
        self._kept = _KeptWarnings()
        log.addHandler(self._kept)
        self._record: JsonlLogger | None = None
        with self._kept_from_ending_the_run():
            self._record = JsonlLogger(run)
        self._others = [BackgroundLogger(name, partial(kind, run)) for name, kind in (kinds or {}).items()]

    @property
    def warnings(self) -> Sequence[str]:
        """One line for each warning that a logger has given; more may come while the run goes on."""
        return self._kept.lines

    def log(self, step: int, metrics: dict[str, float]) -> None:
        with self._kept_from_ending_the_run():
            if self._record:
                self._record.log(step, metrics)
        for logger in self._others:
            logger.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        with self._kept_from_ending_the_run():
            if self._record:
                self._record.log_samples(step, samples)
        for logger in self._others:
            logger.log_samples(step, samples)

    def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """All at the same time, within the deadline."""
        until = time.monotonic() + deadline_s
        with self._kept_from_ending_the_run():
            if self._record:
                self._record.close()
        for logger in self._others:
            logger.begin_close()
        for logger in self._others:
            logger.close(max(0.0, until - time.monotonic()))
        log.removeHandler(self._kept)

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _kept_from_ending_the_run(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # a full disk, or a sample that JSON has no word for
            if not self._has_failed:
                log.exception(
                    "metrics.jsonl and samples.jsonl cannot be written; the run goes on, and it is tried again"
                )
            self._has_failed = True


class _KeptWarnings(logging.StreamHandler):
    """Keeps what loggers warn about, for who shows it, and writes it to the log of the process, which is its stderr."""

    def __init__(self) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        cause = f" ({record.exc_info[1]!r})" if record.exc_info else ""
        self.lines.append(f"{record.getMessage()}{cause}")
