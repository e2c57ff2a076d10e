"""The dispatcher: sends the problems of a step to engines, again if need be, and brings scored groups back."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from polyrhythm.conductor.engines.client import EngineError
from polyrhythm.conductor.engines.health import EngineState
from polyrhythm.conductor.engines.pool import Engine, EnginePool, EngineRequest
from polyrhythm.conductor.steps.ledger import Verdict
from polyrhythm.conductor.steps.step import Step
from polyrhythm.conductor.steps.work_queue import Work, WorkQueue
from polyrhythm.errors import RunError
from polyrhythm.messages import GenerateReply, GenerateRequest
from polyrhythm.rewards.sandbox.frames import GroupScores, GroupToScore, TrainingState
from polyrhythm.rollout import Generate, Rollouter
from polyrhythm.types import Group, Problem, Trace, rollout_seed

TICK_S = 0.5

log = logging.getLogger(__name__)


class Scorer(Protocol):
    """The reward pool, or a stand-in."""

    async def score(self, group: GroupToScore, state: TrainingState) -> GroupScores: ...


@dataclass(frozen=True)
class RequestSettings:
    """What all requests of a run have in common."""

    run_seed: int
    deadline_s: float
    max_attempts: int
    hedge_groups: int
    patience_s: float
    """A request that every serving engine refuses waits this long for engines that do not serve now."""


class Dispatcher:
    """Consumes the positions of a step in `order`, produces finished groups in the step.

    Waits for room in an engine; unblocked by `pool.changed`. A group goes whole to one engine. What fails goes out
    again, with the same seeds, for the rollouts that are missing; a problem that keeps failing is replaced by the next.
    """

    def __init__(
        self,
        step: Step,
        pool: EnginePool,
        rollouter: Rollouter,
        scorer: Scorer,
        settings: RequestSettings,
        next_problem: Callable[[], Problem],
        on_finished: Callable[[Group], None],
        order: Sequence[int] | None = None,
    ):
        self._step = step
        self._pool = pool
        self._rollouter = rollouter
        self._scorer = scorer
        self._settings = settings
        self._next_problem = next_problem
        self._on_finished = on_finished
        positions = range(step.num_groups) if order is None else order
        self._queue = WorkQueue([position for position in positions if position not in step.finished])
        self._requests: dict[int, list[EngineRequest]] = {}
        self._answered_s: list[float] = []

    async def run(self) -> None:
        """Until every group of the step is finished; RunError says why it cannot be."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while not self._step.is_complete:
                    now_s = time.monotonic()
                    self._send_what_fits(tasks, now_s)
                    self._hedge(tasks, now_s)
                    await self._pool.changed.wait(min(TICK_S, self._queue.seconds_to_next(now_s)))
        except* RunError as group:
            raise RunError(str(group.exceptions[0])) from group
        finally:
            for text in self._step.reward_record.report(self._step.number):
                log.warning("%s", text)

    def _send_what_fits(self, tasks: asyncio.TaskGroup, now_s: float) -> None:
        while (work := self._queue.peek(now_s)) is not None:
            engine = self._pool.least_loaded(self._step.version, now_s, work.avoid, work.refused_by)
            if engine is not None:
                self._queue.pop()
                self._step.num_dispatched += work.num_attempts == 0
                tasks.create_task(self._serve(work, self._begin_request(work, engine)))
            elif self._is_refused_by_all(work):
                self._queue.pop()
                self._replace(work, "every engine refuses it")
            elif work.refused_by and not self._willing(work):
                self._queue.put_back(self._queue.pop(), now_s)
            else:
                return

    def _hedge(self, tasks: asyncio.TaskGroup, now_s: float) -> None:
        """Ask idle engines for the last groups too; the first answer counts."""
        num_unfinished = self._step.num_groups - len(self._step.finished)
        if len(self._queue) or not self._answered_s or num_unfinished > self._settings.hedge_groups:
            return
        usual_s = sum(self._answered_s) / len(self._answered_s)
        for position, requests in list(self._requests.items()):
            if len(requests) != 1 or now_s - requests[0].started_s < usual_s:
                continue
            work = self._queue.work(position)
            engine = self._pool.least_loaded(self._step.version, now_s, requests[0].engine.name, work.refused_by)
            if engine is not None and not engine.requests:
                self._step.num_hedged += 1
                tasks.create_task(self._serve(work, self._begin_request(work, engine)))

    def _begin_request(self, work: Work, engine: Engine) -> EngineRequest:
        request = self._pool.begin_request(work.position, engine)
        self._requests.setdefault(work.position, []).append(request)
        return request

    async def _serve(self, work: Work, request: EngineRequest) -> None:
        """One attempt, from the engine to the ledger; the one that brings the last rollout in has the group scored."""
        problem = self._step.problems[work.position]
        prompt_ids = self._rollouter.prompt_ids(problem)
        indices = self._step.ledger.missing(work.position)
        try:
            traces = await self._roll_out(work, request, problem, prompt_ids, indices)
            self._enter(work.position, indices, traces)
        except EngineError as error:
            if error.refused:
                work.refused_by.add(request.engine.name)
                work.refused_since_s = min(work.refused_since_s, time.monotonic())
            self._judge(request, error)
            if not work.is_finished and not self._requests.get(work.position):
                self._try_again(work, request, error)
            return
        request.engine.health.request_succeeded(time.monotonic())
        if work.is_finished:
            return
        work.is_finished = True
        for other in self._requests.get(work.position, []):
            other.abandon()
        scores = await self._score(problem, self._step.ledger.traces(work.position))
        self._step.reward_record.add(work.position, problem.index, scores)
        self._on_finished(self._step.finish(work.position, prompt_ids, scores, time.monotonic()))
        self._pool.changed.set()

    async def _roll_out(
        self, work: Work, request: EngineRequest, problem: Problem, prompt_ids: list[int], indices: list[int]
    ) -> list[Trace]:
        """The rollouts of these indices, all generated by the engine of the request. How is the rollouter's affair."""
        version = self._step.version
        request_id = f"{version}/{work.position}/{problem.epoch}/{problem.index}/{work.num_attempts}"
        generate = Generate(lambda message: self._ask(request, message), request_id, version, prompt_ids)
        run_seed = self._settings.run_seed
        seeds = [rollout_seed(run_seed, version, problem.index, index, problem.epoch) for index in indices]
        try:
            traces = await self._rollouter.run(problem, generate, seeds)
        finally:
            self._pool.end_request(request)
            self._requests[request.position].remove(request)
        self._answered_s.append(time.monotonic() - request.started_s)
        assert len(traces) == len(seeds), f"the rollouter made {len(traces)} traces of {len(seeds)} seeds"
        return traces

    async def _ask(self, request: EngineRequest, message: GenerateRequest) -> GenerateReply:
        """One answer of the engine, checked against what was asked; EngineError if it is none."""
        deadline_s, ledger = self._settings.deadline_s, self._step.ledger
        try:
            if request.is_abandoned:
                raise EngineError("the engine was given up before it was asked")
            async with asyncio.timeout(deadline_s) as request.scope:
                reply = await request.engine.client.generate(message, deadline_s)
        except TimeoutError as error:
            gave_up = "the engine was given up" if request.is_abandoned else f"no answer within {deadline_s:g} s"
            raise EngineError(gave_up) from error
        finally:
            request.scope = None  # between two answers there is nothing to cut short
        if reply.request_id != message.request_id:
            ledger.drop(len(reply.completions))
            raise EngineError(f"it answered request {reply.request_id!r} instead of {message.request_id!r}")
        if len(reply.completions) != len(message.seeds):
            raise EngineError(f"it answered {len(reply.completions)} completions to {len(message.seeds)} seeds")
        if (refusal := ledger.refuse_version(reply.policy_version, len(reply.completions))) is not None:
            raise EngineError(f"a completion is {Verdict.WRONG_VERSION}: {refusal}", wrong_version=True)
        return reply

    def _enter(self, position: int, indices: list[int], traces: list[Trace]) -> None:
        """Offer traces to the ledger; what is good is kept even if a sibling is not."""
        offered = zip(indices, traces, strict=True)
        verdicts = [self._step.ledger.accept(position, index, self._step.version, trace) for index, trace in offered]
        reason = next((reason for verdict, reason in verdicts if verdict is Verdict.MALFORMED), None)
        if reason is not None:
            raise EngineError(f"a completion is {Verdict.MALFORMED}: {reason}")

    def _judge(self, request: EngineRequest, error: EngineError) -> None:
        """What a failed request says of its engine. Nothing, if it was given up already or finds the request wrong."""
        engine, now_s = request.engine, time.monotonic()
        if request.is_abandoned or error.refused:
            return
        log.warning("engine %s failed position %d: %s", engine.name, request.position, error)
        if error.wrong_version:
            engine.health.load_failed(str(error), now_s)
        else:
            engine.health.request_failed(str(error), now_s)
        if engine.health.state is EngineState.QUARANTINED:
            self._pool.give_up(engine)

    def _try_again(self, work: Work, request: EngineRequest, error: EngineError) -> None:
        work.num_attempts += 1
        work.avoid = request.engine.name
        self._step.num_retries += 1
        if work.num_attempts < self._settings.max_attempts and not self._is_refused_by_all(work):
            self._queue.put_back(work, time.monotonic())
        else:
            self._replace(work, f"at last with {request.engine.name}: {error}")

    def _willing(self, work: Work) -> set[str]:
        """The engines that serve the step and have not refused this work."""
        return self._pool.names_serving(self._step.version) - work.refused_by

    def _is_refused_by_all(self, work: Work) -> bool:
        """By those that serve, and by the others too unless they stay away for long: one may be restarting."""
        if self._willing(work):
            return False
        names = {engine.name for engine in self._pool.present if not engine.health.is_leaving}
        if names and names <= work.refused_by:
            return True
        return time.monotonic() - work.refused_since_s > self._settings.patience_s

    def _replace(self, work: Work, reason: str) -> None:
        problem = self._step.problems[work.position]
        cause = f"problem {problem.index} failed {work.num_attempts} times, {reason}"
        if self._step.num_replaced >= self._step.num_groups:
            raise RunError(f"{self._step.num_replaced} problems of the step were replaced already, and {cause}")
        log.warning("%s; it is replaced", cause)
        self._step.replace(work.position, self._next_problem())
        self._queue.start_anew(work)
        self._pool.changed.set()

    async def _score(self, problem: Problem, traces: list[Trace]) -> GroupScores:
        group = GroupToScore(
            problem.columns,
            problem.prompt,
            completions=[self._rollouter.text(trace) for trace in traces],
            completion_ids=[trace.token_ids for trace in traces],
            finish_reason=[trace.finish_reason for trace in traces],
        )
        return await self._scorer.score(group, self._step.training_state)
