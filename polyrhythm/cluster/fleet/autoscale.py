"""How many engines: more when the trainer waits for them, fewer when they wait for the trainer."""

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol

from polyrhythm.cluster.run_folder import ENGINE, free_name
from polyrhythm.config import ClusterConfig
from polyrhythm.errors import RunError
from polyrhythm.observe.activity import Activity, seconds_metric
from polyrhythm.observe.status import EngineState, RunStatus

WAIT_SHARE = 0.4
"""A trainer that waits for groups this share of a step has too few engines."""
IDLE_SHARE = 0.5
"""Engines that are idle this share of a step may be too many."""
FULL_SHARE = 0.85
"""One fewer must still be done with its work in this share of a step, and not let the trainer wait too long."""
NUM_STEPS_SEEN = 3
COOL_DOWN_S = 20.0


class ScalableEngines(Protocol):
    """The engines that the run itself has started, wherever they run; one can be added or let go by name."""

    @property
    def names(self) -> list[str]: ...

    def start(self, name: str) -> None: ...

    def stop(self, name: str) -> None:
        """Let it finish what it has; RunError if it cannot be asked."""
        ...


@dataclass(frozen=True)
class StepDemand:
    """One finished step: how many engines served it, and which shares of it were spent waiting."""

    num_serving: int
    wait_share: float
    idle_share: float


@dataclass(frozen=True)
class Decision:
    """One more, one fewer or neither, and why."""

    change: int
    reason: str


def demand_of(metrics: dict[str, float | None]) -> StepDemand:
    """The demand that the metrics of a step show. Engines are idle from the last group to the end of the step."""

    def seconds(name: str) -> float:
        return metrics.get(name) or 0.0

    step_s = max(seconds("time/step_s"), 1e-9)
    busy_s = seconds("time/load_s") + seconds("generate/last_group_s")
    return StepDemand(
        num_serving=int(metrics["engines/serving"] or 0),
        wait_share=min(1.0, seconds(seconds_metric(Activity.WAIT)) / step_s),
        idle_share=max(0.0, 1.0 - busy_s / step_s),
    )


def decide(steps: list[StepDemand], num_engines: int, fewest: int, most: int) -> Decision:
    """What recent steps, all served by the engines of now, ask for."""
    if len(steps) < NUM_STEPS_SEEN:
        return Decision(0, f"{len(steps)} of {NUM_STEPS_SEEN} steps seen")
    wait_share = fmean(step.wait_share for step in steps)
    idle_share = fmean(step.idle_share for step in steps)
    said = f"over {len(steps)} steps the trainer waited {wait_share:.0%} and engines were idle {idle_share:.0%} of the time"
    if wait_share > WAIT_SHARE and idle_share < IDLE_SHARE:
        if num_engines >= most:
            return Decision(0, f"{said}, but cluster.max_engines={most} engines are there")
        return Decision(+1, f"{said}: one more engine")
    if idle_share > IDLE_SHARE and wait_share < WAIT_SHARE:
        if num_engines <= fewest:
            return Decision(0, f"{said}, but only cluster.min_engines={fewest} engines are there")
        more_for_each = num_engines / (num_engines - 1)
        if (1 - idle_share) * more_for_each <= FULL_SHARE and wait_share * more_for_each < WAIT_SHARE:
            return Decision(-1, f"{said}: one engine fewer")
    return Decision(0, said)


class Autoscaler:
    """Looks at the run's status now and then, and starts or stops one engine at a time.

    Off when cluster.min_engines and cluster.max_engines leave no choice. Each decision is noted with its reason and
    appended to `path`.
    """

    def __init__(
        self,
        config: ClusterConfig,
        engines: ScalableEngines,
        path: Path,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._fewest = config.min_engines or config.num_engines
        self._most = config.max_engines or config.num_engines
        self._engines = engines
        self._path = path
        self._note = note
        self._clock = clock
        self._changed_at_s = clock()
        self._num_seen: int | None = None
        self._steps: deque[StepDemand] = deque(maxlen=NUM_STEPS_SEEN)

    def look(self, status: RunStatus) -> None:
        num_finished = status.num_finished_steps
        num_seen = status.first_step if self._num_seen is None else self._num_seen
        if self._fewest == self._most or num_finished == num_seen:
            return
        self._num_seen = num_finished
        self._see(demand_of(status.last_metrics), self._num_elsewhere(status))
        if self._clock() - self._changed_at_s < COOL_DOWN_S:
            return
        names = self._engines.names
        decision = decide(list(self._steps), len(names), self._fewest, self._most)
        if decision.change:
            self._act(decision, num_finished, names, {engine.name for engine in status.engines})

    def _see(self, step: StepDemand, num_elsewhere: int) -> None:
        """Steps before the last change has taken effect say nothing about the engines of now."""
        if step.num_serving == len(self._engines.names) + num_elsewhere:
            self._steps.append(step)
        else:
            self._steps.clear()

    def _num_elsewhere(self, status: RunStatus) -> int:
        ours = self._engines.names
        serving = (EngineState.READY, EngineState.SUSPECT)
        return sum(engine.state in serving and engine.name not in ours for engine in status.engines)

    def _act(self, decision: Decision, num_finished: int, names: list[str], taken: set[str]) -> None:
        name = free_name(ENGINE, taken | set(names)) if decision.change > 0 else names[-1]
        try:
            if decision.change > 0:
                self._engines.start(name)
            else:
                self._engines.stop(name)
        except RunError as error:
            self._note(f"{name} was not {'started' if decision.change > 0 else 'stopped'}: {error}")
            return
        self._steps.clear()
        self._changed_at_s = self._clock()
        self._note(f"{decision.reason}, {name}")
        line = {
            "time": time.time(), "steps": num_finished, "engine": name, "change": decision.change,
            "engines": len(self._engines.names), "reason": decision.reason,
        }  # fmt: skip
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")
