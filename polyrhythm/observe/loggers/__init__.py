"""Where the metrics and samples of a run go: one kind of logger per file, listed in LOGGERS.

Flow: the conductor tells `Loggers` what a committed step measured and wrote, and that tells every logger. Who only watches
never ends a run: if a logger fails, the log says so once and the run goes on.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from polyrhythm.observe.loggers.jsonl import JsonlLogger

log = logging.getLogger(__name__)


class Logger(Protocol):
    """Keeps or passes on what each step measured; the first step is 1.

    Any method may raise: `Loggers` keeps that from the run.
    """

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def log_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None: ...

    def close(self) -> None: ...


LOGGERS: dict[str, Callable[[Path], Logger]] = {"jsonl": JsonlLogger}
"""Each makes a logger for a run folder."""


class Loggers:
    """All loggers of a run as one, which never raises: `with Loggers(run_dir) as loggers: loggers.log(step, metrics)`.

    A logger that failed is asked again at the next step (a full disk may have room by then); its first failure is logged.
    """

    def __init__(self, run_dir: Path, kinds: dict[str, Callable[[Path], Logger]] | None = None) -> None:
        self._loggers: dict[str, Logger] = {}
        self._failed: set[str] = set()
        for name, kind in (LOGGERS if kinds is None else kinds).items():
            with self._kept_from_ending_the_run(name):
                self._loggers[name] = kind(run_dir)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, logger in self._loggers.items():
            with self._kept_from_ending_the_run(name):
                logger.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        for name, logger in self._loggers.items():
            with self._kept_from_ending_the_run(name):
                logger.log_samples(step, samples)

    def close(self) -> None:
        for name, logger in self._loggers.items():
            with self._kept_from_ending_the_run(name):
                logger.close()

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _kept_from_ending_the_run(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception:  # a logger may be anybody's code
            if name not in self._failed:
                log.exception("logger %s failed; the run goes on, and later failures of it are not repeated here", name)
            self._failed.add(name)
