"""The conductor itself: what the routes of the service do, and the tasks that run between them."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from polyrhythm.conductor.change import Change
from polyrhythm.conductor.dispatcher import Dispatcher, RequestSettings, Scorer, Text
from polyrhythm.conductor.engine_client import EngineClient, EngineError
from polyrhythm.conductor.engine_state import EngineHealth, EngineState
from polyrhythm.conductor.ledger import Ledger
from polyrhythm.conductor.pool import Engine, EnginePool
from polyrhythm.conductor.step import Step
from polyrhythm.conductor.step_metrics import step_metrics
from polyrhythm.config import Config
from polyrhythm.errors import RunError
from polyrhythm.types import Problem, Sampling
from polyrhythm.wire import CommitStep, GroupsReply, JoinRequest, TrainerReport

PROBE_INTERVAL_S = 1.0
PROBE_DEADLINE_S = 5.0
LINGER_S = 1.0
WAIT_TICK_S = 1.0

log = logging.getLogger(__name__)


class Conflict(Exception):
    """A request that does not fit the state of the run: HTTP 409."""


class RunFailed(Exception):
    """The run has failed; the message is the cause: HTTP 503."""


class Problems(Protocol):
    def take(self, cursor: int, n: int) -> list[Problem]: ...


class Writer(Protocol):
    def write(self, step: int, metrics: dict[str, float]) -> None: ...

    def write_samples(self, step: int, samples: list[dict[str, Any]]) -> None: ...


class Conductor:
    """Owns the pool, the open step, the data cursor and what is known of the trainer.

    `run` must be running while the other methods are called; it ends by being cancelled, or with the RunError that says
    why the run cannot go on.
    """

    def __init__(
        self,
        config: Config,
        problems: Problems,
        text: Text,
        sampling: Sampling,
        vocab_size: int,
        scorer: Scorer,
        writer: Writer,
        connect: Callable[[str], EngineClient],
    ):
        self.config = config
        self.pool = EnginePool(groups_per_engine=config.engine.max_batch // config.rollout.group_size + 1)
        self.step: Step | None = None
        self.next_version = 0
        self.cursor = 0
        self.failure: str | None = None
        self.trainer = TrainerReport(doing="start", spans=[])
        self.trainer_since_s = time.monotonic()
        self.history: dict[str, list[float]] = {"reward": [], "accuracy": []}
        self.last_metrics: dict[str, float] = {}
        self.last_samples: list[dict[str, Any]] = []
        self._problems = problems
        self._text = text
        self._settings = RequestSettings(config.seed, sampling, config.conductor.request_deadline_s)
        self._vocab_size = vocab_size
        self._scorer = scorer
        self._writer = writer
        self._connect = connect
        self._changed = Change()
        self._last_event_s = time.monotonic()
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Consumes nothing itself; holds the tasks that steps and engines start, and ends them all at a failure."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._probe_engines())
                while self.failure is None:
                    await self._changed.wait(WAIT_TICK_S)
                    self._check_for_stall()
                # Whoever waits for an answer hears the cause before the server goes.
                await asyncio.sleep(LINGER_S)
                raise RunError(self.failure)
        except* RunError as group:
            raise RunError(str(group.exceptions[0])) from group

    def fail(self, cause: str) -> None:
        """End the run; the first cause counts."""
        if self.failure is None:
            log.error("the run fails: %s", cause)
            self.failure = cause
        self._wake()

    def join(self, request: JoinRequest) -> None:
        """An engine asks to be used: it serves once it has loaded the version of the open step, or of the next one."""
        engine = Engine(request.name, request.url, self._connect(request.url), EngineHealth(since_s=time.monotonic()))
        self.pool.add(engine)
        log.info("engine %s joined from %s", engine.name, engine.url)
        self._event()
        if self.step is not None and self.step.dispatched_at_s is not None and not self.step.is_committed:
            self._start(self._load(engine, self.step.version))

    async def open_step(self, version: int) -> None:
        """Answers when the engines hold `version` and the first groups are on their way. Asking again is harmless."""
        if self.step is None or self.step.version != version:
            if version != self.next_version or (self.step is not None and not self.step.is_committed):
                raise Conflict(f"step {version} cannot be opened: step {self.next_version} is next")
            self.step = self._new_step(version)
            self._event()
            self._start(self._run_step(self.step))
        step = self.step
        while step.dispatched_at_s is None:
            self._raise_failure()
            await self._changed.wait(WAIT_TICK_S)
        self._raise_failure()

    async def groups(self, version: int, offset: int, wait_s: float) -> GroupsReply:
        """Finished groups from `offset` on, as soon as there is one; none when `wait_s` have passed."""
        step = self._step_at(version)
        until_s = time.monotonic() + wait_s
        while True:
            self._raise_failure()
            groups = step.groups_from(offset)
            remaining_s = until_s - time.monotonic()
            if groups or offset >= step.num_groups or remaining_s <= 0:
                return GroupsReply(groups=groups, num_groups=step.num_groups)
            await step.changed.wait(min(remaining_s, WAIT_TICK_S))

    def commit(self, request: CommitStep) -> None:
        """The update is done: log the step and move the cursor. Committing the last step again is harmless."""
        self._raise_failure()
        step = self._step_at(request.version)
        if step.is_committed:
            return
        if not step.is_complete:
            raise Conflict(f"step {step.version} has {len(step.finished)} of {step.num_groups} groups: not all are in")
        step.metrics = step_metrics(step, time.monotonic()) | request.metrics
        self.cursor += step.num_groups
        self.next_version = step.version + 1
        self.last_metrics = step.metrics
        self.last_samples = self._samples(step)
        self.history["reward"].append(step.metrics["reward/mean"])
        self.history["accuracy"].append(step.metrics["reward/accuracy"])
        self._writer.write(step.version, step.metrics)
        self._writer.write_samples(step.version, self.last_samples)
        self._event()

    def report(self, report: TrainerReport) -> None:
        """What the trainer does now, and what it has done."""
        if report.doing != self.trainer.doing or report.spans:
            self._event()
        if report.doing != self.trainer.doing:
            self.trainer_since_s = time.monotonic()
        self.trainer = report
        self.pool.spans.extend(report.spans)

    def _new_step(self, version: int) -> Step:
        rollout = self.config.rollout
        return Step(
            version=version,
            problems=self._problems.take(self.cursor, rollout.groups_per_step),
            ledger=Ledger(version, rollout.groups_per_step, rollout.group_size, self._vocab_size),
            order=self.config.order,
            opened_at_s=time.monotonic(),
        )

    async def _run_step(self, step: Step) -> None:
        """Consumes engines that have joined, produces the groups of the step; waits for loads, then for engines."""
        try:
            await self._wait_for_engines()
            async with asyncio.TaskGroup() as loads:
                for engine in self.pool.present:
                    loads.create_task(self._load(engine, step.version))
            if self.failure is not None:
                return
            step.dispatched_at_s = time.monotonic()
            self._event()
            await Dispatcher(step, self.pool, self._text, self._scorer, self._settings, self._event).run()
            if step.num_scored == 0:
                raise RunError(f"every reward of step {step.version} failed, for example: {step.reward_errors[0]}")
        except RunError as error:
            self.fail(str(error))
        except ExceptionGroup as error:
            log.exception("step %d", step.version)
            self.fail(f"the conductor: {error.exceptions[0]!r}")

    async def _wait_for_engines(self) -> None:
        wanted, deadline_s = self.config.engine.num, self.config.engine.start_deadline_s
        until_s = time.monotonic() + deadline_s
        while len(self.pool.present) < wanted:
            if time.monotonic() > until_s:
                raise RunError(f"{len(self.pool.present)} of {wanted} engines joined within {deadline_s:g} s")
            await self._changed.wait(WAIT_TICK_S)

    async def _load(self, engine: Engine, version: int) -> None:
        """Make an engine load a version and believe it only when it says that it holds it."""
        engine.health.load_started(time.monotonic())
        self.pool.begin(engine, "load")
        try:
            await engine.client.load(version, self.config.weights.load_deadline_s)
            status = await engine.client.status(PROBE_DEADLINE_S)
            if status.policy_version != version:
                raise EngineError(f"it holds version {status.policy_version} after loading {version}")
        except EngineError as error:
            engine.health.load_failed(str(error), time.monotonic())
            self.fail(f"engine {engine.name} did not load version {version}: {error}")
        else:
            engine.saw(status, time.monotonic())
            engine.health.load_succeeded(version, time.monotonic())
        finally:
            self.pool.end(engine)
        self._event()
        self.pool.changed.set()

    async def _probe_engines(self) -> None:
        """Ask every engine how it is, again and again."""
        while True:
            started_s = time.monotonic()
            async with asyncio.TaskGroup() as probes:
                for engine in self.pool.present:
                    if engine.health.state is not EngineState.LOADING:
                        probes.create_task(self._probe(engine))
            await asyncio.sleep(max(0.0, started_s + PROBE_INTERVAL_S - time.monotonic()))

    async def _probe(self, engine: Engine) -> None:
        try:
            status = await engine.client.status(PROBE_DEADLINE_S)
        except EngineError as error:
            engine.health.probe_failed(str(error), time.monotonic())
            if engine.health.state is EngineState.QUARANTINED:
                self.fail(f"engine {engine.name}: {error}")
            return
        engine.saw(status, time.monotonic())
        if engine.health.state in (EngineState.READY, EngineState.SUSPECT):
            engine.health.probe_succeeded(status.policy_version, time.monotonic())

    def _check_for_stall(self) -> None:
        waited_s = time.monotonic() - self._last_event_s
        if waited_s > self.config.conductor.stall_deadline_s:
            from polyrhythm.conductor.status import who_waits

            self.fail(f"nothing has happened for {waited_s:.0f} s: {who_waits(self)}")

    def _samples(self, step: Step) -> list[dict[str, Any]]:
        """The first rollout of the first problems, as text."""
        return [
            {
                "step": step.version,
                "position": position,
                "prompt": step.problems[position].prompt,
                "completion": self._text.decode(group.rollouts[0].completion.token_ids),
                "reward": group.rollouts[0].reward,
                "finish_reason": group.rollouts[0].completion.finish_reason,
            }
            for position, group in sorted(step.finished.items())[: self.config.observe.samples_per_step]
        ]

    def _step_at(self, version: int) -> Step:
        if self.step is None or self.step.version != version:
            raise Conflict(f"step {version} is not open")
        return self.step

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise RunFailed(self.failure)

    def _start(self, work: Any) -> None:
        assert self._tasks is not None, "run() is not running"
        self._tasks.create_task(work)

    def _event(self) -> None:
        self._last_event_s = time.monotonic()
        self._changed.set()

    def _wake(self) -> None:
        self._changed.set()
        if self.step is not None:
            self.step.changed.set()
