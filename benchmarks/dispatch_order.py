"""Longest expected first against problem order: the real conductor with scripted engines whose time grows with length.

Lengths are log-normal with a heavy tail, as those of reasoning models are, and known from an earlier visit. JSON last.
"""

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
from pathlib import Path

from conductor import InstantScorer, NoLogger, Text

from polyrhythm.conductor.conductor import Conductor
from polyrhythm.conductor.step_log import StepLog
from polyrhythm.conductor.steps.journal import Journal
from polyrhythm.config import Config
from polyrhythm.messages import (
    Capabilities,
    EngineStatus,
    GenerateReply,
    GenerateRequest,
    JoinRequest,
    Published,
    Setup,
)
from polyrhythm.rollout import SingleTurn
from polyrhythm.types import Completion, Problem, Sampling

SECONDS_PER_TOKEN = 0.002
SETUP = Setup("1.2.3", "4.5.6", {})
GROUP_SIZE = 2


class Problems:
    """A finite task of `num` problems: every step visits all of them."""

    def __init__(self, num: int):
        self.num = num

    def take(self, cursor: int, n: int) -> list[Problem]:
        return [Problem(index % self.num, f"{index % self.num}") for index in range(cursor, cursor + n)]


class TextWithIndex(Text):
    def encode(self, problem: Problem) -> list[int]:
        return [int(str(problem.prompt))]


class SlowEngine:
    """Takes as long as the problem's completions are; two groups at a time."""

    def __init__(self, lengths: list[int]):
        self.lengths = lengths
        self.version = -1
        self.places = asyncio.Semaphore(2)

    async def generate(self, request: GenerateRequest, deadline_s: float) -> GenerateReply:
        length = self.lengths[request.prompt_ids[0]]
        async with asyncio.timeout(deadline_s), self.places:
            await asyncio.sleep(length * SECONDS_PER_TOKEN)
        completions = [Completion([1] * length, [-1.0] * length, "length") for _ in request.seeds]
        return GenerateReply(request.request_id, request.policy_version, completions)

    async def load(self, version: int, deadline_s: float, meeting: object = None) -> None:
        self.version = version

    async def status(self, deadline_s: float) -> EngineStatus:
        return EngineStatus(self.version, 0, 0, 0, 0.0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="two trials")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"in_order": [], "longest_first": []}
    for trial in range(2 if options.short else options.trials):
        lengths = draw_lengths(options.groups, trial)
        for dispatch in seconds:
            seconds[dispatch].append(asyncio.run(generation_s(dispatch, lengths, options.engines)))
    ratio = sum(seconds["in_order"]) / sum(seconds["longest_first"])
    print(json.dumps({f"{name}_s": [round(s, 3) for s in values] for name, values in seconds.items()}
                     | {"speedup_of_generation": round(ratio, 3)}))  # fmt: skip


def draw_lengths(num: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [min(2000, max(4, int(draw.lognormvariate(4.6, 1.0)))) for _ in range(num)]


async def generation_s(dispatch: str, lengths: list[int], num_engines: int) -> float:
    """Seconds from the first dispatch to the last group, in the second step, when lengths are known."""
    config = Config.model_validate({
        "rollout": {"group_size": GROUP_SIZE, "groups_per_step": len(lengths), "max_tokens": 2000},
        "cluster": {"num_engines": num_engines},
        "engine": {"max_batch": GROUP_SIZE * 2},
        "conductor": {"dispatch": dispatch},
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        rollouter, journal = SingleTurn(TextWithIndex(), Sampling(max_tokens=2000)), Journal(Path(folder))
        conductor = Conductor(
            config, Problems(len(lengths)), rollouter, 50_000, InstantScorer(),
            StepLog(NoLogger(), journal, rollouter.text, num_samples=0), journal, lambda url: SlowEngine(lengths),
            setup=SETUP,
        )  # fmt: skip
        running = asyncio.create_task(conductor.run())
        await asyncio.sleep(0)
        for index in range(num_engines):
            capable = Capabilities(config.engine.max_batch, True, True, False)
            conductor.join(JoinRequest(f"engine-{index}", f"http://127.0.0.1:{index + 1}", capable, SETUP))
        for version in (0, 1):
            conductor.published(Published(version, {}))
            await conductor.wait_for_engines(version)
            num_taken = 0
            while num_taken < len(lengths):
                num_taken += len((await conductor.groups(version, num_taken, len(lengths), 20.0)).groups)
            conductor.published(Published(version + 1, {}))
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        return conductor.step_log.last_metrics["generate/last_group_s"]


if __name__ == "__main__":
    main()
