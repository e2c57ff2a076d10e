"""Weights & Biases. Without a key everything is kept in `wandb/` of the run folder, for `wandb sync` later."""

import logging
import secrets
from collections.abc import Sequence
from typing import Any, Literal

from polyrhythm.observe.loggers.logger import LoggedRun, rows_of

STEP = "step"

log = logging.getLogger(__name__)


class WandbLogger:
    """Metrics over `step`, samples as a table for each step, the configuration as the run's config.

    wandb's own step can only grow, and a resumed run goes back to its last checkpoint: so `step` is a value of ours.
    """

    def __init__(self, run: LoggedRun) -> None:
        from wandb.errors import UsageError

        run_id = run.recall("wandb") or secrets.token_hex(4)
        run.remember("wandb", run_id)
        try:
            self._run = _open(run, run_id, mode=None)
        except UsageError as error:  # there is no key, and no terminal to ask for one
            log.warning("wandb logs this run offline: %s", error)
            self._run = _open(run, run_id, mode="offline")
        self._run.define_metric("*", step_metric=STEP)
        log.info("wandb: %s", "offline; `wandb sync` sends it" if self._run.offline else self._run.url)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({**metrics, STEP: step})

    def log_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        import wandb

        columns, rows = rows_of(samples)
        if rows:
            self._run.log({"samples": wandb.Table(columns=columns, data=rows, allow_mixed_types=True), STEP: step})

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # its process, which would else be ended when this one exits, without a deadline


def _open(run: LoggedRun, run_id: str, mode: Literal["offline"] | None) -> Any:
    """In the mode that the environment says (WANDB_MODE), unless one is given."""
    import wandb

    settings = wandb.Settings(console="off", silent=True)
    return wandb.init(
        project=run.project, name=run.name, id=run_id, resume="allow", config=run.config, dir=run.folder,
        mode=mode, settings=settings,
    )  # fmt: skip
