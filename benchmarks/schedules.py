"""Periodic against sync: the same work, the same threads, one after the other in one run. JSON last.

The learning rate is 0, so that both schedules see exactly the same completions in every step. The bound is the time that no
schedule can beat which waits for the first group and trains after it: engines must generate everything, and the trainer must
train everything after the first group, whichever takes longer, plus what can overlap with nothing.
"""

import argparse
import json
import statistics

from local_runs import metrics_of_run

NUM_WARM_UP_STEPS = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each schedule (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--shots", type=int, default=12, help="solved sums in the prompt (default: %(default)s)")
    parser.add_argument("--max-batch", type=int, default=32, help="completions that decode together")
    parser.add_argument("--short", action="store_true", help="two measured steps")
    options = parser.parse_args()
    if options.short:
        options.steps = 2

    rows = {schedule: measure(schedule, options) for schedule in ("sync", "periodic")}
    sync_s, periodic_s = (statistics.median(row["time/step_s"] for row in rows[s]) for s in ("sync", "periodic"))
    bound_s = statistics.median(lower_bound_s(row) for row in rows["sync"])
    for schedule in rows:
        print(f"{schedule:9} {[round(row['time/step_s'], 2) for row in rows[schedule]]} s per step")
    result = {
        "sync_s_per_step": round(sync_s, 3),
        "periodic_s_per_step": round(periodic_s, 3),
        "periodic_over_sync": round(sync_s / periodic_s, 3),
        "bound_s_per_step": round(bound_s, 3),
        "bound_over_sync": round(sync_s / bound_s, 3),
        "fraction_of_bound": round(bound_s / periodic_s, 3),
        "generate_s": round(statistics.median(row["generate/last_group_s"] for row in rows["sync"]), 3),
        "train_s": round(statistics.median(train_s(row) for row in rows["sync"]), 3),
    }
    print(json.dumps(result))


def measure(schedule: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """The metrics of the measured steps of one run."""
    return metrics_of_run([], flags_for(schedule, options))[NUM_WARM_UP_STEPS:]


def flags_for(schedule: str, options: argparse.Namespace) -> dict[str, object]:
    return {
        "model": options.model,
        "schedule": schedule,
        "num_steps": options.steps + NUM_WARM_UP_STEPS,
        "task": {"name": "addition", "options": {"digits": 4, "shots": options.shots}},
        "rollout": {
            "groups_per_step": options.groups, "group_size": options.group_size, "max_tokens": options.max_tokens,
        },
        "engine": {"max_batch": options.max_batch},
        "training": {"learning_rate": 0.0, "tokens_per_micro_batch": 1024},
    }  # fmt: skip


def train_s(row: dict[str, float]) -> float:
    return row["time/trainer_forward_backward_s"]


def lower_bound_s(row: dict[str, float]) -> float:
    """From the phases of a synchronous step, measured while nothing else ran."""
    generate_s, first_s = row["generate/last_group_s"], row["generate/first_group_s"]
    alone_s = row["time/step_s"] - generate_s - train_s(row)
    return alone_s + max(generate_s, first_s + train_s(row))


if __name__ == "__main__":
    main()
