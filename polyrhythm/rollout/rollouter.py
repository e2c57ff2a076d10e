"""What every kind of rollout has in common: how it is run, and how it asks an engine."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from polyrhythm.messages import GenerateReply, GenerateRequest
from polyrhythm.types import Completion, Problem, Sampling, Trace


class Text(Protocol):
    """How the run's problems are written for the model, and what it wrote is read; or a stand-in."""

    def encode(self, problem: Problem) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class Generate:
    """One attempt at one problem: continues the problem's prompt with one policy version, at one engine.

    What the engine fails at is raised here and passes through the rollouter: the dispatcher makes another attempt, with the
    same seeds for the rollouts that are missing. A draw depends on the rollout's seed and its position after the prompt
    alone, so the attempt that succeeds gives what the failed one would have given.
    """

    def __init__(
        self,
        send: Callable[[GenerateRequest], Awaitable[GenerateReply]],
        request_id: str,
        policy_version: int,
        prompt_ids: list[int],
    ):
        self._send = send
        self._request_id = request_id
        self._policy_version = policy_version
        self._prompt_ids = prompt_ids
        self._num_requests = 0

    async def __call__(self, seeds: list[int], sampling: Sampling) -> list[Completion]:
        """One completion of the prompt for each seed, in their order."""
        request_id = f"{self._request_id}/{self._num_requests}" if self._num_requests else self._request_id
        self._num_requests += 1
        reply = await self._send(
            GenerateRequest(
                request_id=request_id,
                policy_version=self._policy_version,
                prompt_ids=self._prompt_ids,
                seeds=seeds,
                sampling=sampling,
            )
        )
        return reply.completions


class Rollouter(Protocol):
    """A kind of rollout. It holds no state of a rollout: any number of problems are run at the same time."""

    def prompt_ids(self, problem: Problem) -> list[int]:
        """The prompt that all rollouts of a problem share; traces begin after it."""
        ...

    async def run(self, problem: Problem, generate: Generate, seeds: list[int]) -> list[Trace]:
        """One trace for each seed, in their order; every sampled token of it is one that `generate` returned."""
        ...

    def text(self, trace: Trace) -> str:
        """What a reward function reads, and a sample shows."""
        ...
