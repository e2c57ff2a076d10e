"""The quickstart with and without shared prompts: how much of a step is training, and that it still learns. JSON last."""

import argparse
import json
import statistics
from pathlib import Path

from local_runs import metrics_of_run

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24, help="steps of the shared run (default: %(default)s)")
    parser.add_argument(
        "--unshared-steps", type=int, default=6, help="steps of the unshared run (default: %(default)s)"
    )
    parser.add_argument("--short", action="store_true", help="10 and 3 steps")
    options = parser.parse_args()
    if options.short:
        options.steps, options.unshared_steps = 10, 3

    unshared = measure("never", options.unshared_steps)
    shared = measure("always", options.steps)
    compared = shared[: options.unshared_steps]
    accuracy = [row["reward/accuracy"] for row in shared]
    result = {
        "train_s_unshared": seconds(unshared),
        "train_s_shared": seconds(compared),
        "speedup": round(per_group(unshared) / per_group(compared), 2),
        "share_of_step_unshared": share(unshared),
        "share_of_step_shared": share(compared),
        "accuracy_first_five": round(statistics.fmean(accuracy[:5]), 3),
        "accuracy_last_five": round(statistics.fmean(accuracy[-5:]), 3),
    }
    print(json.dumps(result))


def measure(share_prompt: str, num_steps: int) -> list[dict[str, float]]:
    training = {"share_prompt": share_prompt, "threads": 1}
    flags = {"num_steps": num_steps, "training": training, "engine": {"threads": 1}}
    return metrics_of_run([QUICKSTART], flags)


def seconds(rows: list[dict[str, float]]) -> float:
    return round(statistics.median(row["time/trainer_forward_backward_s"] for row in rows), 3)


def per_group(rows: list[dict[str, float]]) -> float:
    """Seconds per group that was trained on; groups without reward variance cost nothing."""
    trained = sum(16 - row["groups/skipped"] for row in rows)
    return sum(row["time/trainer_forward_backward_s"] for row in rows) / trained


def share(rows: list[dict[str, float]]) -> float:
    return round(statistics.median(r["time/trainer_forward_backward_s"] / r["time/step_s"] for r in rows), 3)


if __name__ == "__main__":
    main()
