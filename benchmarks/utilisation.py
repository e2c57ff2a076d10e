"""How busy the cores are over quickstart steps, and what publication and loading of weights cost. JSON last."""

import argparse
import json
import statistics
import threading
import time
from pathlib import Path

import psutil
from local_runs import metrics_of_run

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.toml"
NUM_WARM_UP_STEPS = 2
SAMPLE_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="measured steps (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="five measured steps")
    options = parser.parse_args()
    num_steps = 5 if options.short else options.steps

    recorder = BusyRecorder()
    with recorder:
        rows = metrics_of_run([QUICKSTART], {"num_steps": num_steps + NUM_WARM_UP_STEPS})
    measured = rows[NUM_WARM_UP_STEPS:]
    start_s, end_s = rows[NUM_WARM_UP_STEPS - 1]["time"], rows[-1]["time"]
    weights_s = [row["time/trainer_publish_s"] + row["time/load_s"] for row in measured]
    period_s = (end_s - start_s) / len(measured)
    phases = {
        name: round(statistics.fmean(row.get(f"time/trainer_{name}_s", 0.0) for row in measured), 3)
        for name in ("load", "wait", "forward_backward", "update", "publish", "commit")
    }
    print(json.dumps({
        "cores_busy": round(recorder.busy_between(start_s, end_s), 3),
        "weights_share_of_step": round(statistics.fmean(weights_s) / period_s, 4),
        "s_per_step": round(period_s, 3),
        "first_group_s": round(statistics.fmean(row["generate/first_group_s"] for row in measured), 3),
        "last_group_s": round(statistics.fmean(row["generate/last_group_s"] for row in measured), 3),
        "trainer_s": phases,
    }))  # fmt: skip


class BusyRecorder:
    """Samples the machine's CPU time; nothing else should be running."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._record, daemon=True)

    def __enter__(self) -> "BusyRecorder":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5)

    def busy_between(self, start_s: float, end_s: float) -> float:
        inside = [sample for sample in self.samples if start_s <= sample[0] <= end_s]
        (_, busy0, total0), (_, busy1, total1) = inside[0], inside[-1]
        return (busy1 - busy0) / (total1 - total0)

    def _record(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            times = psutil.cpu_times()
            total = times.user + times.system + times.nice + times.idle + times.iowait + times.irq + times.softirq
            self.samples.append((time.time(), total - times.idle - times.iowait, total))


if __name__ == "__main__":
    main()
