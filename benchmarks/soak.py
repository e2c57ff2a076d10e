"""A run under random faults for a while: nothing lost, nothing twice, nothing off-policy, memory flat.

    python benchmarks/soak.py [--minutes 15] [--ranks 1]

Three engines train a tiny model while engines are killed and stopped, answers, loads and snapshots are broken and reward
workers die, every few seconds. Afterwards an undisturbed run of as many steps must have the same weights byte for byte. With
several ranks they are elastic, and die, stop and slow down too: then sums are added up in other orders, and what is compared
is that no group was lost or counted twice. The last line is JSON.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import fmean

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from polyrhythm.chaos.plan import read_fault_log  # noqa: E402
from polyrhythm.observe.loggers.jsonl import read_metrics  # noqa: E402
from polyrhythm.weights.store import WeightStore  # noqa: E402
from tests.tiny_model import save_tiny_model  # noqa: E402

SAMPLE_S = 2.0
END_DEADLINE_S = 30.0
CHECKPOINT_EVERY = 5
NUM_ENGINES = 3
GROUP_SIZE, GROUPS_PER_STEP = 4, 6

# Seconds between two faults of a kind, at each engine.
ENGINE_FAULTS = {
    "kill": 90, "stop": 60, "slow": 40, "error": 40, "reset": 40, "truncate": 40, "nan": 40, "wrong_version": 60,
    "duplicate": 40, "reorder": 40, "fail_load": 60, "truncate_snapshot": 60, "corrupt_snapshot": 60,
}  # fmt: skip
REWARD_FAULTS = {"kill": 20, "stop": 40}
# At each rank and moment: rare enough that those which were started again are back before all have died.
RANK_KILLS = {"forward_backward": 500, "reduce": 500, "publish": 500}
RANK_FAULTS = {"stop": 90, "slow": 60}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("SOAK_MINUTES", "15")))
    parser.add_argument("--ranks", type=int, default=1, help="training processes")
    options = parser.parse_args()
    minutes, ranks = options.minutes, ["--training.num_ranks", str(options.ranks)]
    is_elastic = options.ranks > 1
    ranks += ["--training.elastic"] * is_elastic
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored, in children too
    with tempfile.TemporaryDirectory() as folder:
        work_dir = Path(folder)
        save_tiny_model(work_dir / "model")
        problems = [{"prompt": f"{a} plus {b} is", "answer": str(a + b)} for a in range(4) for b in range(4)]
        (work_dir / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
        (work_dir / "plan.toml").write_text(plan(is_elastic))
        memory = soak(work_dir, minutes, ranks)
        figures = figures_of(disturbed := newest_run(work_dir)) | memory
        version = max(WeightStore(disturbed / "checkpoints").versions(), default=0)
        if not is_elastic:
            figures["steps_compared"] = version
            print(f"an undisturbed run of {version} steps, to compare", flush=True)
            train(work_dir, version, *ranks).wait(60 * minutes + 120)
            figures["same_weights"] = checkpoint(disturbed, version) == checkpoint(newest_run(work_dir), version)
    print(json.dumps(figures))
    wrong = figures["rollouts_lost"] or not figures.get("same_weights", True) or version == 0 or figures["ended_early"]
    raise SystemExit(1 if wrong else 0)


def plan(is_elastic: bool) -> str:
    faults = [{"what": what, "where": "engine-*", "every_s": every_s} for what, every_s in ENGINE_FAULTS.items()]
    faults += [{"what": "kill", "where": "engine-*", "at": "idle", "every_s": 120}]
    faults += [{"what": what, "where": "reward", "every_s": every_s} for what, every_s in REWARD_FAULTS.items()]
    if is_elastic:
        faults += [{"what": "kill", "where": "trainer-*", "at": at, "every_s": s} for at, s in RANK_KILLS.items()]
        faults += [
            {"what": what, "where": "trainer-*", "at": "forward_backward", "every_s": s}
            for what, s in RANK_FAULTS.items()
        ]
    lines = ["seed = 1"]
    for fault in faults:
        extra = {"stop": {"for_s": 3}, "slow": {"factor": 10}}.get(fault["what"], {})
        lines += ["[[fault]]", *(f"{key} = {json.dumps(value)}" for key, value in (fault | extra).items())]
    return "\n".join(lines)


def train(work_dir: Path, num_steps: int, *more: str) -> subprocess.Popen[bytes]:
    flags = {
        "model": "./model", "num_steps": num_steps, "order": "problem", "task.name": "dataset",
        "task.options": json.dumps({"path": "problems.jsonl"}), "reward.functions": json.dumps(["hash_reward:score"]),
        "rollout.group_size": GROUP_SIZE, "rollout.max_tokens": 12,
        "rollout.groups_per_step": GROUPS_PER_STEP, "cluster.num_engines": NUM_ENGINES, "engine.max_batch": 16,
        "cluster.max_restarts": 100_000, "training.learning_rate": 1e-3, "training.tokens_per_micro_batch": 128,
        "training.checkpoint_every": CHECKPOINT_EVERY, "conductor.request_deadline_s": 10,
        "conductor.max_attempts": 100, "weights.load_deadline_s": 10, "reward.deadline_s": 1, "observe.view": "none",
    }  # fmt: skip
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    return subprocess.Popen(
        [sys.executable, "-m", "polyrhythm", "train", *words, *more],
        cwd=work_dir,
        env=os.environ | {"PYTHONPATH": path},
    )


def soak(work_dir: Path, minutes: float, flags: list[str]) -> dict[str, object]:
    """Memory of conductor and trainer over time, in MB."""
    process = train(work_dir, 1_000_000, *flags, "--chaos", "plan.toml")
    until_s = time.monotonic() + 60 * minutes
    samples: dict[str, list[float]] = {"conductor": [], "trainer": []}
    try:
        while time.monotonic() < until_s and process.poll() is None:
            time.sleep(SAMPLE_S)
            for child in psutil.Process(process.pid).children():
                with contextlib.suppress(psutil.Error):  # an engine that was just killed
                    for name in samples.keys() & set(child.cmdline()):
                        samples[name].append(child.memory_info().rss / 2**20)
    finally:
        has_ended = process.poll() is not None
        process.send_signal(signal.SIGINT)
        process.wait(END_DEADLINE_S)
    memory = {f"{name}_mb": memory_over_time(values) for name, values in samples.items()}
    return {**memory, "ended_early": has_ended}


def memory_over_time(values: list[float]) -> list[float]:
    """Means of five equal stretches; the first holds the start."""
    size = max(1, len(values) // 5)
    return [round(fmean(values[start : start + size]), 1) for start in range(0, size * 5, size) if values[start:]]


def figures_of(run: Path) -> dict[str, object]:
    rows = read_metrics(run)
    witness = read_fault_log(run)
    seconds = witness[-1]["time"] - witness[0]["time"] if witness else 0.0

    def total(metric: str) -> int:
        return int(sum(row[metric] for row in rows))

    return {
        "steps": len(rows),
        "rollouts": len(rows) * GROUPS_PER_STEP * GROUP_SIZE,
        "faults": dict(Counter(f"{line['where'].split('-')[0]}: {line['what']}" for line in witness)),
        "num_faults": len(witness),
        "seconds_between_faults": round(seconds / max(1, len(witness) - 1), 2),
        "rollouts_lost": total("reward/excluded") + total("groups/replaced") * GROUP_SIZE,
        "duplicates_dropped": total("ledger/duplicates"),
        "off_policy_refused": total("onpolicy/violations"),
        # An accepted rollout of another policy would show here: the trainer scores every token again.
        "logprob_mismatch_max": max((row.get("mismatch/logprob_abs_max", 0.0) for row in rows), default=0.0),
        "requests_sent_again": total("dispatch/retries"),
        "engines_lost": total("engines/lost"),
        "ranks_lost": sum(row.get("ranks/lost", 0) for row in rows),
        "groups_trained_again": sum(row.get("ranks/groups_again", 0) for row in rows),
    }


def newest_run(work_dir: Path) -> Path:
    return max((work_dir / "runs").iterdir())


def checkpoint(run: Path, version: int) -> bytes:
    """The tensors of a checkpoint as they are on disk: policy, optimizer moments and the number of updates."""
    path = WeightStore(run / "checkpoints").folder(version) / "model.safetensors"
    return path.read_bytes() if path.exists() else b""


if __name__ == "__main__":
    main()
