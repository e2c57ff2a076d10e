"""The conductor itself: what the routes of the service do, and the tasks that run between them."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from polyrhythm.conductor.admission import refuse_unfit
from polyrhythm.conductor.change import Change
from polyrhythm.conductor.engines.broadcast import Broadcasts
from polyrhythm.conductor.engines.client import EngineClient
from polyrhythm.conductor.engines.cores import CoreBalance, CorePlan
from polyrhythm.conductor.engines.health import EngineHealth, EngineState, Limits
from polyrhythm.conductor.engines.monitor import EngineMonitor
from polyrhythm.conductor.engines.pool import Engine, EnginePool
from polyrhythm.conductor.ranks.elastic import ElasticRanks
from polyrhythm.conductor.ranks.membership import membership_of
from polyrhythm.conductor.ranks.rendezvous import Rendezvous
from polyrhythm.conductor.refusals import Conflict, Dismissed, RunFailed
from polyrhythm.conductor.step_log import StepLog
from polyrhythm.conductor.steps.assignment import GroupAssignment, Rank
from polyrhythm.conductor.steps.dispatcher import Dispatcher, RequestSettings, Scorer
from polyrhythm.conductor.steps.journal import Journal
from polyrhythm.conductor.steps.ledger import Ledger
from polyrhythm.conductor.steps.lengths import LengthHistory
from polyrhythm.conductor.steps.step import Step
from polyrhythm.conductor.trainer_state import TrainerState
from polyrhythm.config import Config
from polyrhythm.errors import RunError
from polyrhythm.messages import GroupsReply, JoinRequest, Published, Setup
from polyrhythm.observe.activity import ActivityReport
from polyrhythm.rewards.sandbox.frames import TrainingState
from polyrhythm.rollout import Rollouter
from polyrhythm.types import Group, Problem
from polyrhythm.weights.snapshot import loading_deadline_s

LINGER_S = 1.0
TICK_S = 1.0
SETTLE_TICK_S = 0.25
MIN_PATIENCE_S = 1.0
STUCK_FRACTION = 0.2
"""An engine with work that generates nothing for this part of a request's deadline is given up."""

log = logging.getLogger(__name__)


class Problems(Protocol):
    def take(self, cursor: int, n: int) -> list[Problem]: ...


class Conductor:
    """Owns the pool, the open step, the data cursor and what is known of the trainer.

    `run` must be running while the other methods are called; it ends by being cancelled, or with the RunError that says
    why the run cannot go on.
    """

    def __init__(
        self,
        config: Config,
        problems: Problems,
        rollouter: Rollouter,
        vocab_size: int,
        scorer: Scorer,
        step_log: StepLog,
        journal: Journal,
        connect: Callable[[str], EngineClient],
        setup: Setup,
        cores: CorePlan | None = None,
        first_step: int = 0,
        snapshot_bytes: int = 0,
    ):
        self.config = config
        self.pool = EnginePool()
        self.step: Step | None = None
        self.failure: str | None = None
        self.trainer = TrainerState(config.training.rank_names)
        self.rendezvous = Rendezvous(self.raise_failure)
        meeting = (config, first_step, self.rendezvous, self.raise_failure, self._event)
        self.elastic = ElasticRanks(*meeting, self.fail, self.trainer.forget) if config.training.elastic else None
        self.membership = self.elastic or membership_of(*meeting)
        self.first_step = first_step
        self.setup = setup
        self.step_log = step_log
        self._problems = problems
        self._rollouter = rollouter
        self._settings = RequestSettings(
            config.seed,
            config.conductor.request_deadline_s,
            config.conductor.max_attempts,
            config.conductor.hedge_groups,
            config.engine.joins_within_s,
        )
        self._vocab_size = vocab_size
        self._scorer = scorer
        self._journal = journal
        self._connect = connect
        self._lengths = LengthHistory()
        self._changed = Change()
        load_deadline_s = loading_deadline_s(config.weights.load_deadline_s, snapshot_bytes)
        stuck_s = STUCK_FRACTION * config.conductor.request_deadline_s
        self.broadcasts = Broadcasts(load_deadline_s, self.raise_failure)
        self._monitor = EngineMonitor(self.pool, self.broadcasts, load_deadline_s, stuck_s, self._event)
        self._last_event_s = time.monotonic()
        self._servable_s = time.monotonic()
        self._tasks: asyncio.TaskGroup | None = None
        self.cores = CoreBalance(cores, self.pool, lambda: self.trainer.whole.doing, self._changed) if cores else None

    async def run(self) -> None:
        """Holds the tasks that steps and engines start, watches over them, and ends them all at a failure."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                if self.cores is not None:
                    tasks.create_task(self.cores.run())
                while self.failure is None:
                    await self._changed.wait(TICK_S)
                    self._check_for_engines()
                    if cause := self.membership.why_lost(is_over=self.step is not None and self.step.is_committed):
                        self.fail(cause)
                    self._check_for_stall()
                # Whoever waits for an answer hears the cause before the server goes.
                await asyncio.sleep(LINGER_S)
                raise RunError(self.failure)
        except* RunError as group:
            raise RunError(str(group.exceptions[0])) from group

    def raise_failure(self) -> None:
        """Nobody waits for anything in a run that has failed."""
        if self.failure is not None:
            raise RunFailed(self.failure)

    def fail(self, cause: str) -> None:
        """End the run; the first cause counts."""
        if self.failure is None:
            log.error("the run fails: %s", cause)
            self.failure = cause
        self._changed.set()
        if self.step is not None:
            self.step.changed.set()

    def join(self, request: JoinRequest) -> None:
        """An engine asks to be used: it serves once it has loaded the version of the open step, or of the next."""
        known = self.pool.get(request.name)
        if known is not None and known.url == request.url and not known.health.is_leaving:
            known.health.is_alive(time.monotonic())
            return
        refuse_unfit(f"engine {request.name}", request.setup, self.setup, with_torch=False)
        if not request.capabilities.reads_store:
            raise Conflict(f"engine {request.name} cannot read the weight store, and this run sends weights to nobody")
        limits = Limits(lease_s=self.config.conductor.lease_s)
        health = EngineHealth(since_s=time.monotonic(), limits=limits)
        # One group more than decodes together, so that the next one is there when a row is free.
        max_groups = request.capabilities.max_completions // self.config.rollout.group_size + 1
        engine = Engine(request.name, request.url, self._connect(request.url), health, request.capabilities, max_groups)
        self.pool.add(engine)
        log.info("engine %s joined from %s", engine.name, engine.url)
        self._start(self._monitor.watch(engine))
        self._event()

    def heartbeat(self, beat: JoinRequest) -> None:
        engine = self.pool.get(beat.name)
        if engine is not None and (engine.is_dismissed or engine.url != beat.url):
            raise Dismissed(f"engine {beat.name} was {engine.health.cause or 'replaced by another of its name'}")
        self._engine(beat.name).health.is_alive(time.monotonic())

    def drain(self, name: str) -> None:
        """Give an engine no further work; it is gone when what it has is finished."""
        engine = self._engine(name)
        engine.health.drain(time.monotonic())
        engine.wake.set()
        self._event()

    def remove(self, name: str) -> None:
        """Let an engine go at once; what it was working on goes elsewhere."""
        self.pool.dismiss(self._engine(name), "removed", for_good=True)
        self._event()

    def published(self, request: Published) -> None:
        """New weights are in the store: log the step that made them, let go of it, and begin the next.

        To say the last version again is harmless. After the last step of the run none begins.
        """
        self.raise_failure()
        version, step = request.version, self.step
        if step is not None and version == step.version + step.is_committed:
            return
        if step is not None:
            self._check_done(step, version)
        cursor = self._journal.cursor(version)
        if cursor is None or version > self.config.num_steps:
            raise Conflict(f"weights v{version} cannot be: step {version} was never finished")
        if step is not None:
            self._close_step(step, request.metrics)
        if version < self.config.num_steps:
            self._begin_step(version, cursor)

    async def wait_for_engines(self, version: int, rank: Rank = 0) -> None:
        """Answers when `version` is published, engines hold it and the first groups are on their way."""
        self._check_rank(rank)
        while self.step is None or self.step.version < version:
            self.raise_failure()
            await self._changed.wait(TICK_S)
        step = self._step_at(version)
        while step.dispatched_at_s is None:
            self.raise_failure()
            await self._changed.wait(TICK_S)
        self.raise_failure()

    async def groups(self, version: int, offset: int, until: int, wait_s: float, rank: Rank = 0) -> GroupsReply:
        """The groups of a rank after its first `offset`, among the first `until` of the step, as soon as there is one.

        None when there will be no more, or when `wait_s` have passed.
        """
        self._check_rank(rank)
        step = self._step_at(version)
        until_s = time.monotonic() + wait_s
        while True:
            self.raise_failure()
            may_deal = self.elastic is None or self.elastic.may_deal_to(str(rank))
            groups, is_last = step.share(rank, offset, min(until, step.num_groups)) if may_deal else ([], False)
            remaining_s = until_s - time.monotonic()
            if groups or is_last or remaining_s <= 0:
                return GroupsReply(groups=groups, is_last=is_last)
            await step.changed.wait(min(remaining_s, TICK_S))

    def report(self, report: ActivityReport) -> None:
        """What a rank of the trainer does now, and what it has done. What one does that is gone is of no interest."""
        if self.elastic is None and report.process not in self.trainer.ranks:
            raise Conflict(f"{report.process!r} is not one of the trainer's ranks: {', '.join(self.trainer.ranks)}")
        if (self.elastic is None or self.elastic.members.named(report.process)) and self.trainer.observe(report):
            self._event()
        self.pool.spans.extend(report.spans)

    async def trainer_threads(self, known: int, wait_s: float) -> int:
        """How many threads the trainer should use, as soon as that is not the known number; 0: as it was started."""
        self.raise_failure()
        return await self.cores.trainer_threads(known, wait_s) if self.cores else 0

    def _check_done(self, step: Step, version: int) -> None:
        """Conflict unless the step can have made these weights."""
        if version != step.version + 1 or step.is_committed:
            raise Conflict(f"weights v{version} cannot be: step {step.number} is open")
        if not step.is_complete:
            raise Conflict(f"step {step.number} has {len(step.finished)} of {step.num_groups} groups: not all are in")
        if self.elastic:
            self.elastic.check_trained(step)
        if step.assignment.num_taken < step.num_groups:
            raise Conflict(
                f"the ranks have taken {step.assignment.num_taken} of the {step.num_groups} groups of step {step.number}: "
                f"all of training.num_ranks={self.config.training.num_ranks} must take part"
            )

    def _close_step(self, step: Step, metrics: dict[str, float]) -> None:
        engines: dict[str, float] = {
            "engines/serving": self.pool.num_serving(step.version),
            "engines/received": self.pool.num_received(step.version),
            "engines/lost": self.pool.num_lost,
        }
        self.pool.num_lost = 0
        if self.cores is not None:
            engines["cores/changes"] = self.cores.num_changes
            self.cores.num_changes = 0
        ranks = self.elastic.close_step(step) if self.elastic else {}
        self.step_log.close(step, engines | ranks, metrics)
        self._journal.forget_groups_before(step.version)
        self._event()

    def _begin_step(self, version: int, cursor: int) -> None:
        rollout = self.config.rollout
        step = Step(
            version=version,
            cursor=cursor,
            problems=self._problems.take(cursor, rollout.groups_per_step),
            ledger=Ledger(version, rollout.groups_per_step, rollout.group_size, self._vocab_size, rollout.max_tokens),
            schedule=self.config.schedule,
            order=self.config.order,
            assignment=GroupAssignment.of(self.config),
            opened_at_s=time.monotonic(),
            last_group_before_s=max(self.step.finished_at_s.values()) if self.step else None,
            training_state=TrainingState(version, self.config.num_steps, self.step_log.epoch(cursor) or 0.0),
        )
        num_restored = sum(step.restore(group, time.monotonic()) for group in self._journal.groups(version))
        if num_restored:
            log.info("step %d goes on with %d groups that were finished before", step.number, num_restored)
        self.step = step
        self._note_end_of_generation()
        self._servable_s = time.monotonic()
        if self.elastic:
            self.elastic.begin_step(step)
        self._event()
        self._start(self._run_step(step))

    async def _run_step(self, step: Step) -> None:
        """Consumes a step's problems, produces its groups; waits for engines to hold its version, then for answers."""
        try:
            self.broadcasts.plan(step.version, self.pool.present)
            self._monitor.aim(step.version)
            await self._wait_until_engines_settle(step)
            step.dispatched_at_s = time.monotonic()
            self._event()
            longest_first = self.config.conductor.dispatch == "longest_first" and self.config.order == "completion"
            dispatcher = Dispatcher(
                step, self.pool, self._rollouter, self._scorer, self._settings, self._next_problem, self._group_finished,
                order=self._lengths.dispatch_order(step.problems) if longest_first else None,
            )  # fmt: skip
            await dispatcher.run()
            if step.have_all_rewards_failed:
                raise RunError(f"every reward of step {step.number} failed, for example: {step.reward_record.example}")
            if not step.has_signal:
                log.warning("no reward function applies to any rollout of step %d: it teaches nothing", step.number)
        except RunError as error:
            self.fail(str(error))
        except Exception as error:  # a defect of ours: say it everywhere instead of leaving the trainer to wait
            log.exception("step %d", step.number)
            self.fail(f"the conductor failed: {error!r}")

    def _next_problem(self) -> Problem:
        assert self.step is not None
        return self._problems.take(self.step.next_cursor, 1)[0]

    def _group_finished(self, group: Group) -> None:
        self._journal.add_group(group)
        self._lengths.observe(group)
        self._note_end_of_generation()
        self._event()

    def _note_end_of_generation(self) -> None:
        """From here on the next step may begin, in this process or in one that is started after a crash."""
        if self.step is not None and self.step.is_complete:
            self._journal.set_cursor(self.step.version + 1, self.step.next_cursor)

    async def _wait_until_engines_settle(self, step: Step) -> None:
        """Until every engine has loaded or failed; once one has loaded, the others get as long again."""
        first_ready_s = None
        while True:
            now_s = time.monotonic()
            undecided = [engine for engine in self.pool.present if self._monitor.is_undecided(engine)]
            num_joined = len(self.pool.engines)
            if self.pool.num_serving(step.version):
                first_ready_s = first_ready_s or now_s
                patience_s = max(MIN_PATIENCE_S, first_ready_s - step.opened_at_s)
                if (
                    not undecided and num_joined >= self.config.cluster.num_engines
                ) or now_s > first_ready_s + patience_s:
                    return
            await self.pool.changed.wait(SETTLE_TICK_S)

    def _check_for_engines(self) -> None:
        """A step that no engine can serve for too long ends the run."""
        step, now_s = self.step, time.monotonic()
        if step is None or step.is_complete or self.pool.num_serving(step.version):
            self._servable_s = now_s
            return
        deadline_s = self.config.engine.joins_within_s
        if now_s - self._servable_s > deadline_s:
            causes = [f"{engine.name} is {engine.health.state}: {engine.health.cause}" for engine in self.pool.engines]
            said = "; ".join(causes) or "none has joined"
            self.fail(f"no engine could serve version {step.version} for {deadline_s:g} s: {said}")

    def _check_for_stall(self) -> None:
        generated_s = max((engine.progress_at_s for engine in self.pool.present if engine.requests), default=0.0)
        waited_s = time.monotonic() - max(self._last_event_s, generated_s)
        deadline_s = self.config.conductor.stall_deadline_s
        if self.step is None:  # engines and trainer are starting, which has a deadline of its own
            deadline_s = max(deadline_s, self.config.engine.joins_within_s)
        if self.failure is None and waited_s > deadline_s:
            from polyrhythm.conductor.status import dump, who_waits

            log.error("a stall, and who waits for whom:\n%s", dump(self))
            self.fail(f"nothing has happened for {waited_s:.0f} s: {who_waits(self)}")

    def _engine(self, name: str) -> Engine:
        engine = self.pool.get(name)
        if engine is None or engine.health.state is EngineState.GONE:
            raise Conflict(f"there is no engine {name!r}: join first")
        return engine

    def _check_rank(self, rank: Rank) -> None:
        num = self.config.training.num_replicas
        if self.elastic is not None:
            self.elastic.check(str(rank))
        elif not (isinstance(rank, int) and 0 <= rank < num):
            raise Conflict(
                f"there is no rank {rank}: {num} take groups by training.num_ranks and training.ranks_per_replica"
            )

    def _step_at(self, version: int) -> Step:
        if self.step is None or self.step.version != version:
            raise Conflict(f"step {version + 1} is not open")
        return self.step

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None, "run() is not running"
        self._tasks.create_task(work)

    def _event(self) -> None:
        self._last_event_s = time.monotonic()
        self._changed.set()
