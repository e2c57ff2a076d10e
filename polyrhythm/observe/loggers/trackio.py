"""Trackio: metrics in its local database, which `trackio show` opens, or in the Space of TRACKIO_SPACE_ID."""

import logging
from collections.abc import Sequence
from typing import Any

from polyrhythm.observe.loggers.logger import LoggedRun, rows_of

log = logging.getLogger(__name__)


class TrackioLogger:
    """Metrics by step, samples as a table for each step, the configuration as the run's config."""

    def __init__(self, run: LoggedRun) -> None:
        import trackio

        known = run.recall("trackio")
        self._run = trackio.init(
            project=run.project, name=run.name, config=run.config, resume="allow" if known else "never",
            embed=False, auto_log_cpu=False, auto_log_gpu=False,
        )  # fmt: skip
        if known and self._run.id != known:
            log.warning("trackio has a newer run that is called %r, and this run goes on in it", run.name)
        run.remember("trackio", self._run.id)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        import trackio

        columns, rows = rows_of(samples)
        if rows:
            self._run.log({"samples": trackio.Table(columns=columns, data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()
