"""The dispatcher: sends the problems of a step to engines and brings scored groups back."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from polyrhythm.conductor.engine_client import EngineError
from polyrhythm.conductor.ledger import Verdict
from polyrhythm.conductor.pool import Engine, EnginePool
from polyrhythm.conductor.step import Step
from polyrhythm.errors import RunError
from polyrhythm.rewards.frames import RewardResult
from polyrhythm.types import ChatMessage, Completion, Problem, Sampling, rollout_seed
from polyrhythm.wire import GenerateReply, GenerateRequest

TICK_S = 1.0


class Scorer(Protocol):
    """The reward pool, or a stand-in."""

    async def score(
        self, columns: dict[str, Any], prompt: str | list[ChatMessage], completion_text: str, completion_ids: list[int]
    ) -> RewardResult: ...


class Text(Protocol):
    """The tokenizer, or a stand-in."""

    def encode(self, prompt: str | list[ChatMessage]) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class RequestSettings:
    """What all requests of a run have in common."""

    run_seed: int
    sampling: Sampling
    deadline_s: float


class Dispatcher:
    """Consumes the positions of a step in order, produces finished groups in the step.

    Waits for room in an engine; unblocked by `pool.changed`. A group goes whole to one engine.
    """

    def __init__(
        self,
        step: Step,
        pool: EnginePool,
        text: Text,
        scorer: Scorer,
        settings: RequestSettings,
        on_progress: Callable[[], None] = lambda: None,
    ):
        self._step = step
        self._pool = pool
        self._text = text
        self._scorer = scorer
        self._settings = settings
        self._on_progress = on_progress
        self._pending = deque(range(step.num_groups))

    async def run(self) -> None:
        """Until every group of the step is finished; RunError says why it cannot be."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while not self._step.is_complete:
                    while self._pending and (engine := self._idlest()) is not None:
                        tasks.create_task(self._serve(self._pending.popleft(), engine))
                    await self._pool.changed.wait(TICK_S)
        except* RunError as group:
            raise RunError(str(group.exceptions[0])) from group

    def _idlest(self) -> Engine | None:
        engine = self._pool.least_loaded(self._step.version, time.monotonic())
        if engine is not None:
            self._pool.take(engine)
        return engine

    async def _serve(self, position: int, engine: Engine) -> None:
        step = self._step
        problem = step.problems[position]
        prompt_ids = self._text.encode(problem.prompt)
        indices = step.ledger.missing(position)
        step.num_dispatched += 1
        try:
            reply = await engine.client.generate(
                self._request(position, problem, prompt_ids, indices), self._settings.deadline_s
            )
        except EngineError as error:
            engine.health.request_failed(str(error), time.monotonic())
            raise RunError(f"engine {engine.name}: {error}") from error
        finally:
            self._pool.release(engine)
        self._enter(position, indices, reply, engine)
        rewards = await self._score(problem, step.ledger.completions(position))
        step.finish(position, prompt_ids, rewards, time.monotonic())
        self._on_progress()
        self._pool.changed.set()

    def _request(self, position: int, problem: Problem, prompt_ids: list[int], indices: list[int]) -> GenerateRequest:
        version = self._step.version
        return GenerateRequest(
            request_id=f"{version}/{position}",
            policy_version=version,
            prompt_ids=prompt_ids,
            seeds=[rollout_seed(self._settings.run_seed, version, problem.index, index) for index in indices],
            sampling=self._settings.sampling,
        )

    def _enter(self, position: int, indices: list[int], reply: GenerateReply, engine: Engine) -> None:
        """Offer the completions of a reply to the ledger."""
        if len(reply.completions) != len(indices):
            raise RunError(
                f"engine {engine.name} answered {len(reply.completions)} completions to {len(indices)} seeds"
            )
        for index, completion in zip(indices, reply.completions, strict=True):
            verdict, reason = self._step.ledger.accept(position, index, reply.policy_version, completion)
            if verdict is not Verdict.ACCEPTED:
                raise RunError(f"engine {engine.name}: a completion was refused ({verdict}): {reason}")

    async def _score(self, problem: Problem, completions: list[Completion]) -> list[float | None]:
        async with asyncio.TaskGroup() as tasks:
            scores = [
                tasks.create_task(
                    self._scorer.score(
                        problem.columns, problem.prompt, self._text.decode(completion.token_ids), completion.token_ids
                    )
                )
                for completion in completions
            ]
        results = [score.result() for score in scores]
        self._step.num_scored += sum(result.reward is not None for result in results)
        self._step.reward_errors += [result.error for result in results if result.error is not None]
        return [result.reward for result in results]
