"""Ranks of a trainer as processes of a benchmark: each runs the script again and prints one line of JSON."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from polyrhythm.cluster.cores import process_environment
from tests.meeting_place import CREDENTIAL, meeting_place

DEADLINE_S = 900
GROUP_SIZE, PROMPT, COMPLETION = 8, 51, 4


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """With `--rank` the script is one of the ranks."""
    for name, kind in (("rank", int), ("num-ranks", int), ("folder", Path), ("meeting", str), ("parallel", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)


def run_ranks(
    script: str, arguments: list[str], num_ranks: int, folder: Path, *, parallel: str = "replicate", threads: int = 1
) -> list[dict[str, Any]]:
    """What each rank has said."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, script, *arguments, "--num-ranks", str(num_ranks), "--folder", str(folder)]
    with meeting_place(*(f"trainer-{rank}" for rank in range(num_ranks))) as place:
        ranks = [
            subprocess.Popen(
                [*command, "--parallel", parallel, "--rank", str(rank), "--meeting", place.url],
                env=process_environment(threads), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        try:
            said = [rank.communicate(timeout=DEADLINE_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, (_, trouble) in zip(ranks, said, strict=True):
        if rank.returncode:
            raise SystemExit(trouble)
    return [json.loads(output.splitlines()[-1]) for output, _ in said]


def meet(options: argparse.Namespace, training: Any):
    """The replica of this rank."""
    from polyrhythm.training.parallel.ranks import join_ranks, replica_kind

    return join_ranks(options.meeting, CREDENTIAL, f"trainer-{options.rank}", kind=replica_kind(training))


def roomy_place() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def make_group(version: int, position: int):
    """As long as a group of the quickstart."""
    from polyrhythm.types import Completion, Group, Rollout, Trace

    rollouts = []
    for index in range(GROUP_SIZE):
        tokens = [100 + (7 * position + 3 * index + place) % 1000 for place in range(COMPLETION)]
        completion = Completion(token_ids=tokens, rollout_logprobs=[-1.0] * COMPLETION, finish_reason="stop")
        rollouts.append(Rollout(index, Trace.of(completion), version, reward=float(index % 2)))
    prompt = [100 + (11 * position + place) % 1000 for place in range(PROMPT)]
    return Group(version, position, position, prompt, rollouts)
