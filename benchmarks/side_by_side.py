"""What two quickstarts side by side cost each other: at most 2.4 times as long as one alone. JSON last.

The steps after the first are measured; of two runs the slower one counts. `--busy N` adds N processes that only burn CPU
time, each in a session of its own.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.toml"
LIMIT = 2.4
RUN_DEADLINE_S = 3600.0
BURN = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each run (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="how often each is measured (default: %(default)s)")
    parser.add_argument("--busy", type=int, default=0, help="also one run beside this many busy processes")
    parser.add_argument("--short", action="store_true", help="two measured steps, once")
    options = parser.parse_args()
    num_steps, num_repeats = (2, 1) if options.short else (options.steps, options.repeats)

    alone, both, beside_busy = [], [], []
    for number in range(num_repeats):  # in turns, so that a slow spell of the machine meets all of them
        alone.append(slowest_step_s(1, num_steps))
        both.append(slowest_step_s(2, num_steps))
        print(f"{number + 1} of {num_repeats}: alone {alone[-1]:.2f} s/step, side by side {both[-1]:.2f} s/step")
        if options.busy:
            with busy_processes(options.busy):
                beside_busy.append(slowest_step_s(1, num_steps))
            print(f"  beside {options.busy} busy processes {beside_busy[-1]:.2f} s/step")
    ratio = statistics.median(both) / statistics.median(alone)
    print(f"side by side takes {ratio:.2f} times as long as alone; at most {LIMIT} is good")
    report = {
        "alone_s_per_step": round(statistics.median(alone), 3),
        "side_by_side_s_per_step": round(statistics.median(both), 3),
        "ratio": round(ratio, 3),
        "limit": LIMIT,
        "steps": num_steps,
        "repeats": num_repeats,
    }
    if beside_busy:
        report |= {"busy": options.busy, "beside_busy_s_per_step": round(statistics.median(beside_busy), 3)}
        report["beside_busy_ratio"] = round(statistics.median(beside_busy) / statistics.median(alone), 3)
    print(json.dumps(report))


def slowest_step_s(num_runs: int, num_steps: int) -> float:
    """Seconds per step of the slowest of so many quickstarts at the same time, without their first step."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(num_runs) as threads:
        return max(threads.map(lambda index: step_s(Path(folder) / str(index), num_steps), range(num_runs)))


def step_s(folder: Path, num_steps: int) -> float:
    command = [
        sys.executable, "-m", "polyrhythm", "train", str(QUICKSTART), "--num_steps", str(num_steps + 1),
        "--output_dir", str(folder), "--observe.view", "none",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=RUN_DEADLINE_S)
    (metrics,) = folder.glob("*/metrics.jsonl")
    ends_s = [json.loads(line)["time"] for line in metrics.read_text().splitlines()]
    return (ends_s[-1] - ends_s[0]) / num_steps


@contextmanager
def busy_processes(num: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", BURN], start_new_session=True) for _ in range(num)]
    time.sleep(1.0)
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait(10)


if __name__ == "__main__":
    main()
