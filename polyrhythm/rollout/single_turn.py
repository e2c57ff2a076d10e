"""One answer to one prompt."""

from polyrhythm.rollout.rollouter import Generate, Text
from polyrhythm.types import Problem, Sampling, Trace


class SingleTurn:
    """Asks once, for all rollouts of a group together, so that the engine computes their prompt once."""

    def __init__(self, text: Text, sampling: Sampling):
        self._text = text
        self._sampling = sampling

    def prompt_ids(self, problem: Problem) -> list[int]:
        return self._text.encode(problem)

    async def run(self, problem: Problem, generate: Generate, seeds: list[int]) -> list[Trace]:
        return [Trace.of(completion) for completion in await generate(seeds, self._sampling)]

    def text(self, trace: Trace) -> str:
        return self._text.decode(trace.token_ids)
