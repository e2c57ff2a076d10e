"""The status of a run: what the conductor answers and the views, the autoscaler and the supervisor read."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal

import msgspec

from polyrhythm.observe.activity import Activity, Span

CURVE_METRICS = (
    "reward/mean",
    "reward/accuracy",
    "completion/tokens_mean",
    "train/entropy",
    "time/step_s",
)
MAX_CURVE_STEPS = 1000


class EngineState(StrEnum):
    """What the conductor thinks of an engine; `conductor/engines/health.py` says how it gets there."""

    JOINING = "joining"
    LOADING = "loading"
    READY = "ready"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"
    DRAINING = "draining"
    GONE = "gone"


class EngineView(msgspec.Struct, frozen=True):
    """One engine, as the conductor knows it."""

    name: str
    url: str
    state: EngineState
    cause: str = ""
    """Why it is in that state, if it is not a good one."""
    is_dismissed: bool = False
    """It was drained or removed, and shall not come back."""
    policy_version: int | None = None
    """None until it has loaded and proved one."""
    num_running: int = 0
    num_waiting: int = 0
    tokens_per_s: float = 0.0
    is_busy: bool = False
    num_in_flight_groups: int = 0


class RankView(msgspec.Struct, frozen=True):
    """One rank of the trainer: what it does, and for how long it has done that."""

    name: str
    doing: Activity
    for_s: float
    state: str = ""
    """Of an elastic rank: joining, training or leaving."""


class GroupCounts(msgspec.Struct, frozen=True):
    """How far the groups of the open step are."""

    expected: int
    dispatched: int = 0
    complete: int = 0
    taken: int = 0


class SampleView(msgspec.Struct, frozen=True):
    """One rollout of the last step, as text."""

    prompt: str
    completion: str
    reward: float | None


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment. A number that is not finite comes as None, because JSON has no other way to say it."""

    num_steps: int
    first_step: int = 0
    """Steps that were finished before these processes were started: not 0 after --resume."""
    num_finished_steps: int = 0
    """Of the whole run, those of `first_step` included."""
    schedule: Literal["periodic", "sync"] = "periodic"
    policy_version: int | None = None
    """Of the step that is open; None before the first one."""
    trainer: RankView
    """The trainer as a whole."""
    ranks: list[RankView]
    lost_ranks: dict[str, float] = {}
    """Elastic ranks that were given up, and when; seconds since the epoch."""
    num_expected_engines: int
    engines: list[EngineView]
    groups: GroupCounts
    last_metrics: dict[str, float | None] = {}
    curves: dict[str, list[float | None]] = {}
    """The last steps' values of CURVE_METRICS, the last one at the end."""
    samples: list[SampleView] = []
    waiting: str = ""
    """One sentence: who waits for whom."""
    spans: list[Span] = []
    failure: str | None = None
    notes: list[str] = []
    """What the user should know and nothing else shows, in the order in which it happened."""

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done; the trained model may still be being written."""
        return self.num_finished_steps >= self.num_steps

    @property
    def step_number(self) -> int:
        """The step that is open, counted from 1 as everywhere where users see steps; the last one when all are done."""
        return min(self.num_finished_steps + 1, self.num_steps)


class Curves:
    """The values of CURVE_METRICS over the steps of a run, also over those before a resume."""

    def __init__(self, records: Sequence[Mapping[str, Any]] = ()) -> None:
        self.values: dict[str, list[float | None]] = {name: [] for name in CURVE_METRICS}
        for record in records[-MAX_CURVE_STEPS:]:
            self.add(record)

    def add(self, metrics: Mapping[str, Any]) -> None:
        for name, values in self.values.items():
            values.append(metrics.get(name))
            del values[:-MAX_CURVE_STEPS]
