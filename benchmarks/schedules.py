"""Periodic against sync: the same work in one run, each once with a static split of the cores and once with cores that
follow demand (for sync: all cores for each phase in turn). JSON last.

The learning rate is 0, so that every run sees exactly the same completions in every step. The bound is the time that no
schedule can beat which waits for the first group and trains after it: engines must generate everything, and the trainer must
train everything after the first group, whichever takes longer, plus what can overlap with nothing. It is computed from the
phases of the synchronous run with the same split, measured while nothing else ran.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from against_trl import endless_model, write_problems
from local_runs import metrics_of_run

from polyrhythm.weights.pretrained import resolve_model

NUM_WARM_UP_STEPS = 1
SPLIT = {"engine": {"threads": 1}, "training": {"threads": 1}, "cluster": {"cores": "split"}}
FOLLOW = {"cluster": {"cores": "follow"}}
Row = dict[str, float]


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        model_dir = endless_model(resolve_model(options.model), work / "model")
        write_problems(work / "problems.jsonl", model_dir, options.groups, options.prompt)
        runs = {
            (schedule, cores): measure(schedule, placement, options, work)
            for cores, placement in (("split", SPLIT), ("follow", FOLLOW))
            for schedule in ("sync", "periodic")
        }
    seconds = {key: statistics.median(row["time/step_s"] for row in rows) for key, rows in runs.items()}
    for (schedule, cores), rows in runs.items():
        print(f"{schedule:9} {cores:7} {[round(row['time/step_s'], 2) for row in rows]} s per step")
    bound_s = statistics.median(lower_bound_s(row) for row in runs["sync", "split"])
    print(
        json.dumps({
            "sync_s_per_step": round(seconds["sync", "split"], 3),
            "periodic_s_per_step": round(seconds["periodic", "split"], 3),
            "periodic_over_sync": round(seconds["sync", "split"] / seconds["periodic", "split"], 3),
            "bound_s_per_step": round(bound_s, 3),
            "fraction_of_bound": round(bound_s / seconds["periodic", "split"], 3),
            "sync_all_cores_s_per_step": round(seconds["sync", "follow"], 3),
            "periodic_follow_s_per_step": round(seconds["periodic", "follow"], 3),
            "periodic_over_sync_all_cores": round(seconds["sync", "follow"] / seconds["periodic", "follow"], 3),
            "generate_s": round(statistics.median(row["generate/last_group_s"] for row in runs["sync", "split"]), 3),
            "first_group_s": round(statistics.median(r["generate/first_group_s"] for r in runs["sync", "split"]), 3),
            "train_s": round(statistics.median(train_s(row) for row in runs["sync", "split"]), 3),
        })
    )  # fmt: skip


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each run (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=12, help="groups per step (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument(
        "--max-batch", type=int, default=8, help="completions that decode together (default: %(default)s)"
    )
    parser.add_argument("--short", action="store_true", help="two measured steps")
    options = parser.parse_args()
    if options.short:
        options.steps = 2
    return options


def measure(schedule: str, placement: dict[str, Any], options: argparse.Namespace, work: Path) -> list[Row]:
    """The metrics of the measured steps of one run. The reward differs between completions: every group is trained on."""
    flags: dict[str, Any] = {
        "model": str(work / "model"),
        "schedule": schedule,
        "num_steps": options.steps + NUM_WARM_UP_STEPS,
        "task": {"name": "dataset", "options": {"path": str(work / "problems.jsonl")}},
        "reward": {"functions": ["hash_reward:score"]},
        "rollout": {
            "groups_per_step": options.groups, "group_size": options.group_size, "max_tokens": options.max_tokens,
        },
        "engine": {"max_batch": options.max_batch} | placement.get("engine", {}),
        "training": {"learning_rate": 0.0, "tokens_per_micro_batch": 512} | placement.get("training", {}),
        "cluster": placement["cluster"],
    }  # fmt: skip
    return metrics_of_run([], flags)[NUM_WARM_UP_STEPS:]


def train_s(row: Row) -> float:
    return row["time/trainer_forward_backward_s"]


def lower_bound_s(row: Row) -> float:
    generate_s, first_s = row["generate/last_group_s"], row["generate/first_group_s"]
    alone_s = row["time/step_s"] - generate_s - train_s(row)
    return alone_s + max(generate_s, first_s + train_s(row))


if __name__ == "__main__":
    main()
