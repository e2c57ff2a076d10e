"""How many engines and elastic ranks: whoever is waited for grows, and who waits may become fewer."""

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol

from polyrhythm.cluster.run_folder import ENGINE, RANK, free_name
from polyrhythm.config import ClusterConfig, TrainingConfig
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


class Scalable(Protocol):
    """The engines, or the ranks, that the run itself has started, wherever they run; one can be added or let go by name."""

    @property
    def names(self) -> list[str]: ...

    def start(self, name: str) -> None: ...

    def stop(self, name: str) -> None:
        """Let it finish what it has; RunError if it cannot be asked."""
        ...


@dataclass(frozen=True)
class StepDemand:
    """One finished step: how many engines served it, which shares of it were spent waiting, and how many ranks trained."""

    num_serving: int
    wait_share: float
    idle_share: float
    num_ranks: int = 1


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
        num_ranks=int(metrics.get("ranks/num") or 1),
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


def decide_ranks(steps: list[StepDemand], num_ranks: int, fewest: int, most: int) -> Decision:
    """The same for ranks: engines that are idle wait for the trainer, which one more rank makes faster."""
    if len(steps) < NUM_STEPS_SEEN:
        return Decision(0, f"{len(steps)} of {NUM_STEPS_SEEN} steps seen")
    wait_share = fmean(step.wait_share for step in steps)
    idle_share = fmean(step.idle_share for step in steps)
    said = f"over {len(steps)} steps the trainer waited {wait_share:.0%} and engines were idle {idle_share:.0%} of the time"
    if idle_share > IDLE_SHARE and wait_share < WAIT_SHARE:
        if num_ranks >= most:
            return Decision(0, f"{said}, but training.max_ranks={most} ranks are there")
        return Decision(+1, f"{said}: one more rank")
    if wait_share > WAIT_SHARE and num_ranks > fewest:
        more_for_each = num_ranks / (num_ranks - 1)
        if (1 - wait_share) * more_for_each <= FULL_SHARE:
            return Decision(-1, f"{said}: one rank fewer")
    return Decision(0, said)


@dataclass(frozen=True)
class Scaling:
    """A kind of process that may become more or fewer, and within which bounds."""

    kind: str
    processes: Scalable
    fewest: int
    most: int


class Autoscaler:
    """Looks at the run's status now and then, and starts or stops one engine or one elastic rank at a time.

    Who is waited for grows before anybody else becomes fewer. Off when the fewest and the most of both kinds leave no choice. Each decision is noted with its reason and
    appended to `path`.
    """

    def __init__(
        self,
        config: ClusterConfig,
        engines: Scalable,
        path: Path,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        training: TrainingConfig | None = None,
        ranks: Scalable | None = None,
    ):
        fewest, most = config.min_engines or config.num_engines, config.max_engines or config.num_engines
        self._engines = Scaling(ENGINE, engines, fewest, most)
        self._ranks = None
        if training is not None and ranks is not None:
            fewest, most = training.min_ranks or training.num_ranks, training.max_ranks or training.num_ranks
            self._ranks = Scaling(RANK, ranks, fewest, most)
        self._path = path
        self._note = note
        self._clock = clock
        self._changed_at_s = clock()
        self._num_seen: int | None = None
        self._steps: deque[StepDemand] = deque(maxlen=NUM_STEPS_SEEN)

    def look(self, status: RunStatus) -> None:
        num_finished = status.num_finished_steps
        num_seen = status.first_step if self._num_seen is None else self._num_seen
        kinds = [self._engines, *([self._ranks] if self._ranks else [])]
        if all(kind.fewest == kind.most for kind in kinds) or num_finished == num_seen:
            return
        self._num_seen = num_finished
        self._see(demand_of(status.last_metrics), status)
        if self._clock() - self._changed_at_s < COOL_DOWN_S:
            return
        taken = {process.name for process in (*status.engines, *status.ranks)}
        for kind, decision in sorted(self._decisions(), key=lambda decided: -decided[1].change):
            if decision.change:
                self._act(kind, decision, num_finished, taken)
                return

    def _decisions(self) -> list[tuple[Scaling, Decision]]:
        steps, engines, ranks = list(self._steps), self._engines, self._ranks
        decided = [(engines, decide(steps, len(engines.processes.names), engines.fewest, engines.most))]
        if ranks is not None:
            decided.append((ranks, decide_ranks(steps, len(ranks.processes.names), ranks.fewest, ranks.most)))
        return decided

    def _see(self, step: StepDemand, status: RunStatus) -> None:
        """Steps before the last change has taken effect say nothing about the engines and ranks of now."""
        ours, serving = self._engines.processes.names, (EngineState.READY, EngineState.SUSPECT)
        elsewhere = sum(engine.state in serving and engine.name not in ours for engine in status.engines)
        is_of_now = step.num_serving == len(ours) + elsewhere
        if self._ranks is not None:
            names = self._ranks.processes.names
            is_of_now &= step.num_ranks == len(
                {*names, *(rank.name for rank in status.ranks if rank.state == "training")}
            )
        if is_of_now:
            self._steps.append(step)
        else:
            self._steps.clear()

    def _act(self, kind: Scaling, decision: Decision, num_finished: int, taken: set[str]) -> None:
        names = kind.processes.names
        name = free_name(kind.kind, taken | set(names)) if decision.change > 0 else names[-1]
        try:
            if decision.change > 0:
                kind.processes.start(name)
            else:
                kind.processes.stop(name)
        except RunError as error:
            self._note(f"{name} was not {'started' if decision.change > 0 else 'stopped'}: {error}")
            return
        self._steps.clear()
        self._changed_at_s = self._clock()
        self._note(f"{decision.reason}, {name}")
        what = "engine" if kind is self._engines else "rank"
        line = {
            "time": time.time(), "steps": num_finished, what: name, "change": decision.change,
            f"{what}s": len(kind.processes.names), "reason": decision.reason,
        }  # fmt: skip
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")
