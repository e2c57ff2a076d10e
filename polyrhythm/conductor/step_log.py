"""What is logged when a step is closed, and what the status shows of the last one."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from polyrhythm.conductor.steps.journal import Journal
from polyrhythm.conductor.steps.metrics import step_metrics
from polyrhythm.conductor.steps.samples import step_samples
from polyrhythm.conductor.steps.step import Step
from polyrhythm.observe.loggers import Logger
from polyrhythm.observe.metrics import in_order
from polyrhythm.observe.status import Curves
from polyrhythm.types import Trace


class StepLog:
    """Tells the logger about every closed step. Totals over steps are kept in the journal: they go on after a resume."""

    def __init__(
        self,
        logger: Logger,
        journal: Journal,
        text: Callable[[Trace], str],
        num_samples: int,
        *,
        num_problems: int | None = None,
        correct_above: float | None = None,
        curves: Curves | None = None,
        notes: Sequence[str] = (),
    ):
        self.curves = curves or Curves()
        self.notes = notes
        """What the loggers want the user to know; they add to it."""
        self.last_metrics: dict[str, float] = {}
        self.last_samples: list[dict[str, Any]] = []
        self._logger = logger
        self._journal = journal
        self._num_samples = num_samples
        self._text = text
        self._num_problems = num_problems
        self._correct_above = correct_above

    def close(self, step: Step, of_engines: dict[str, float], of_trainer: dict[str, float]) -> None:
        """The step is over: put together what everybody measured, log it, and let `step.metrics` say that it is closed."""
        epoch = self.epoch(step.next_cursor)
        of_step = step_metrics(step, time.monotonic(), epoch=epoch, correct_above=self._correct_above)
        step.metrics = in_order(of_step | of_engines | self._totals(step, of_trainer) | of_trainer)
        self.last_metrics = step.metrics
        self.last_samples = step_samples(step, self._num_samples, self._text)
        self.curves.add(step.metrics)
        self._logger.log(step.number, self.last_metrics)
        self._logger.log_samples(step.number, self.last_samples)

    def epoch(self, cursor: int) -> float | None:
        """How often the run has gone through its problems once it has taken so many; None if they have no end."""
        return cursor / self._num_problems if self._num_problems else None

    def _totals(self, step: Step, of_trainer: dict[str, float]) -> dict[str, float]:
        num_generated = sum(group.num_sampled for group in step.finished.values())
        totals = self._journal.add_to_totals(step.version, num_generated, int(of_trainer.get("train/tokens", 0)))
        return {
            "tokens/total_generated": totals.generated_tokens,
            "tokens/total_trained": totals.trained_tokens,
        }
