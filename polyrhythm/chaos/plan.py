"""Faults on purpose: the plan of a run, which fault is due now, and the log of those that fired.

A plan is a TOML file of `[[fault]]` tables; docs/faults.md has the list. Each process asks its own `Faults` at the
moments that it alone knows, such as the third request of a step, and does the damage to itself.
"""

import fnmatch
import json
import math
import os
import random
import shutil
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from polyrhythm.errors import UserError
from polyrhythm.observe.activity import Activity

PLAN_FILE = "chaos.toml"
FAULT_LOG_FILE = "chaos.jsonl"

SIGNALS = ("kill", "stop")
ANSWERS = ("slow", "error", "reset", "truncate", "nan", "wrong_version", "duplicate", "reorder")
SNAPSHOTS = ("truncate_snapshot", "corrupt_snapshot")
POSSIBLE = {
    "engine": (*SIGNALS, *ANSWERS, *SNAPSHOTS, "fail_load"),
    "trainer": (*SIGNALS, *SNAPSHOTS, "disk_full", "slow"),
    "conductor": SIGNALS,
    "reward": SIGNALS,
}
MAX_NAMED_RANKS = 1000
REQUEST = "request"
"""A request reaches an engine: the one moment that is no activity."""
USUAL_MOMENT = {
    "engine": REQUEST, "trainer": Activity.COMMIT, "conductor": Activity.WAIT, "reward": Activity.SCORE,
}  # fmt: skip
ENGINE_MOMENTS = (REQUEST, Activity.IDLE, Activity.LOAD)
REWARD_MOMENTS = (Activity.SCORE,)
TRAINER_MOMENTS = (
    Activity.START, Activity.LOAD, Activity.WAIT, Activity.FORWARD_BACKWARD, Activity.AGREE, Activity.REDUCE, Activity.UPDATE,
    Activity.PUBLISH, Activity.COMMIT, Activity.CHECKPOINT, Activity.SAVE,
)  # fmt: skip


class Fault(BaseModel):
    """One kind of damage: what, to whom, and when."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    what: str
    """kill and stop are SIGKILL and SIGSTOP; the others break answers, loads or snapshots."""
    where: str
    """engine-0 (or engine-* for all), trainer (trainer-0 if there are several ranks), conductor, or reward: a worker
    that scores."""
    step: int = Field(default=0, ge=0)
    """It fires in this step or, if the moment does not come, in a later one."""
    at: str = ""
    """The moment. Engines: request, idle or load. Trainer and conductor: what the trainer does, such as commit."""
    nth: int = Field(default=1, ge=1)
    """Which of these moments, counted from `step` on; 1 is the first."""
    times: int | None = Field(default=None, ge=0)
    """How often it fires, at that moment and the following ones; 0 is no limit. Default: once; no limit with `every_s`."""
    every_s: float = Field(default=0.0, ge=0)
    """If set, it fires at random, with this many seconds between two on average."""
    for_s: float = Field(default=0.0, ge=0)
    """stop: the process goes on after this time, 0 is never. slow: the answer comes this much later."""
    factor: float = Field(default=1.0, ge=1)
    """slow: the answer takes this many times as long."""
    until: str = ""
    """slow: the answer comes when this file exists."""

    @property
    def limit(self) -> float:
        times = int(not self.every_s) if self.times is None else self.times
        return times or math.inf

    @property
    def role(self) -> str:
        return self.where.split("-")[0]

    @property
    def moment(self) -> str:
        if self.at:
            return self.at
        if self.what in SNAPSHOTS or self.what in ("fail_load", "disk_full"):
            return Activity.LOAD if self.role == "engine" else Activity.PUBLISH
        return USUAL_MOMENT[self.role]

    @model_validator(mode="after")
    def _is_possible(self) -> "Fault":
        if self.role not in POSSIBLE:
            raise ValueError(f"where={self.where!r} is nobody: use engine-0, trainer, conductor or reward")
        possible = POSSIBLE[self.role]
        if self.what not in possible:
            raise ValueError(f"what={self.what!r} cannot happen to {self.where}: possible are {', '.join(possible)}")
        moments = {"engine": ENGINE_MOMENTS, "reward": REWARD_MOMENTS}.get(self.role, TRAINER_MOMENTS)
        if self.moment not in moments:
            raise ValueError(f"at={self.at!r} is no moment of {self.where}: use one of {', '.join(moments)}")
        if self.role == "reward" and self.step:
            raise ValueError(f"step={self.step} is not known where rewards are scored: count scores with nth")
        only_at = REQUEST if self.what in ANSWERS else Activity.LOAD if self.what in (*SNAPSHOTS, "fail_load") else ""
        if self.role == "engine" and only_at and self.moment != only_at:
            raise ValueError(f"at={self.at!r} does not fit what={self.what!r}: leave it out")
        if self.until and self.what != "slow":
            raise ValueError(
                f"until={self.until!r} does not fit what={self.what!r}: only a slow answer waits for a file"
            )
        return self


class ChaosPlan(BaseModel):
    """The faults of a run. `seed` draws the moments of those with `every_s`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fault: list[Fault]
    seed: int = 0


def read_plan(path: Path) -> ChaosPlan:
    """The plan in a TOML file; a mistake is a UserError with one line per mistake."""
    try:
        return ChaosPlan(**tomllib.loads(path.read_text()))
    except OSError as error:
        raise UserError(f"cannot read the chaos plan {path}: {error.strerror}") from None
    except ValidationError as error:
        raise UserError("\n".join(f"{path}: {_explain(mistake)}" for mistake in error.errors())) from None
    except ValueError as error:  # no TOML, or not even text
        raise UserError(f"{path} is not valid TOML: {error}") from None


def check_ranks(plan: ChaosPlan, rank_names: Collection[str], *, is_elastic: bool = False) -> None:
    """UserError for a fault of a trainer's rank that the run does not have: it would never fire. Elastic ranks may come later."""
    if is_elastic:
        rank_names = [f"trainer-{rank}" for rank in range(MAX_NAMED_RANKS)]
    for number, fault in enumerate(plan.fault, 1):
        if fault.role == "trainer" and not fnmatch.filter(rank_names, fault.where):
            raise UserError(f"fault {number}: where={fault.where!r} is nobody: use {', '.join(list(rank_names)[:8])}")


class Faults:
    """The faults of one process of a run.

    What has fired is read back from the fault log, so that a process that was killed and restarted is not killed again.
    """

    def __init__(self, plan: ChaosPlan, run_dir: Path, where: str, clock: Callable[[], float] = time.monotonic):
        self._where = where
        self._log = run_dir / FAULT_LOG_FILE
        self._clock = clock
        self._mine = {index: fault for index, fault in enumerate(plan.fault) if fnmatch.fnmatchcase(where, fault.where)}
        self._num_seen: Counter[int] = Counter()
        self._num_fired = Counter(
            line["fault"] for line in read_fault_log(run_dir) if line["where"] == where and line["fault"] in self._mine
        )
        self._random = random.Random(f"{plan.seed}/{where}/{self._num_fired.total()}")
        self._due_s = {index: clock() + self._pause_s(fault) for index, fault in self._mine.items()}

    def due(self, moment: str, step: int, impossible: Collection[str] = ()) -> Fault | None:
        """The fault that must fire now, at most one. The caller makes it happen, after `record` has logged it."""
        for index, fault in self._mine.items():
            if fault.moment != moment or fault.what in impossible or step < fault.step:
                continue
            if not fault.every_s:
                self._num_seen[index] += 1
            if self._is_due(index, fault):
                self._num_fired[index] += 1
                self._due_s[index] = self._clock() + self._pause_s(fault)
                return fault
        return None

    def record(self, fault: Fault, step: int, detail: str = "", pid: int = 0) -> None:
        """Write down that a fault fires. One write, so that lines of several processes do not mix."""
        index = next(index for index, mine in self._mine.items() if mine is fault)
        line = {
            "time": time.time(), "fault": index, "what": fault.what, "where": self._where, "step": step,
            "detail": detail, "pid": pid or os.getpid(), "for_s": fault.for_s,
        }  # fmt: skip
        descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)

    def _is_due(self, index: int, fault: Fault) -> bool:
        if self._num_fired[index] >= fault.limit:
            return False
        if fault.every_s:
            return self._clock() >= self._due_s[index]
        # A process that was restarted has not seen the moments before it; that it has fired says that they had come.
        return self._num_seen[index] >= fault.nth or self._num_fired[index] > 0

    def _pause_s(self, fault: Fault) -> float:
        return self._random.expovariate(1 / fault.every_s) if fault.every_s else 0.0


def keep_plan(plan: Path | None, run_dir: Path) -> None:
    """Put the chaos plan of a run where all its processes find it; without one there are no faults."""
    (run_dir / PLAN_FILE).unlink(missing_ok=True)
    if plan is not None:
        shutil.copyfile(plan, run_dir / PLAN_FILE)


def faults_of(run_dir: Path, where: str) -> Faults | None:
    """The faults that the run's chaos plan has for one process; None in a run without a plan."""
    plan = run_dir / PLAN_FILE
    return Faults(read_plan(plan), run_dir, where) if plan.exists() else None


def read_fault_log(run_dir: Path) -> list[dict[str, Any]]:
    """The faults that have fired in a run, in their order."""
    path = run_dir / FAULT_LOG_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def damage(path: Path, what: str) -> None:
    """Put a shorter or an altered file in the place of a snapshot's. By renaming: others may have mapped the old one."""
    content = path.read_bytes()
    middle = len(content) // 2
    altered = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    beside = path.with_suffix(".damaged")
    beside.write_bytes(content[:middle] if what == "truncate_snapshot" else altered)
    os.replace(beside, path)


def _explain(mistake: Any) -> str:
    number = mistake["loc"][1] + 1 if len(mistake["loc"]) > 1 else None
    where = f"fault {number}: " if number else ""
    if mistake["type"] == "value_error":
        return f"{where}{mistake['ctx']['error']}"
    key = ".".join(str(part) for part in mistake["loc"][2 if number else 0 :])
    said = mistake["msg"][0].lower() + mistake["msg"][1:]
    return f"{where}{key}: {said}"
