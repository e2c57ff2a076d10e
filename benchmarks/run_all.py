"""Run the benchmarks one after the other. Each measures both sides in one run and prints JSON last.

The JSON goes to benchmarks/results/, and benchmarks/RESULTS.md is written from it, with benchmarks/NOTES.md below.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
NOTES = HERE / "NOTES.md"
RAW = HERE / "results"
RESULTS = HERE / "RESULTS.md"
DEADLINE_S = 3600


class Benchmark(NamedTuple):
    """What a script shows, and how the numbers of its JSON line are told; `{rows[0][speedup]}` reaches inside."""

    title: str
    figures: str


BENCHMARKS = {
    "engine.py": Benchmark(
        "The embedded engine against transformers `generate`, vLLM on CPU (if its environment is there) and the decoding roofline",
        "{over_hf_generate:.1f} × `generate`; {of_roofline:.0%} of the roofline; {tokens_per_s[ours]:.0f} tokens/s",
    ),
    "weights.py": Benchmark(
        "Publication of new weights and their load, as multiples of a memory copy of the same bytes",
        "publication {over_a_copy[publication]:.1f} ×; load by the embedded engine {over_a_copy[embedded_snapshot]:.1f} ×, by vLLM "
        "(if its environment is there) from the snapshot {over_a_copy[vllm_snapshot]} ×, by broadcast {over_a_copy[vllm_broadcast]} ×",
    ),
    "kernels.py": Benchmark("Each kernel on and off", "{summary}"),
    "shared_prompt.py": Benchmark(
        "Forward and backward with shared prompts against well-packed unshared ones",
        "prompt {rows[0][prompt]}, {rows[0][group]} × {rows[0][completion]} tokens: {rows[0][speedup]:.2f} × of {rows[0][rho]:.2f}; "
        "prompt {rows[1][prompt]}, {rows[1][group]} × {rows[1][completion]}: {rows[1][speedup]:.2f} × of {rows[1][rho]:.2f}",
    ),
    "logprobs.py": Benchmark(
        "Log-probabilities without logits, vocabulary of 152k",
        "{chunked_extra_mb:.0f} MB instead of {full_logits_extra_mb:.0f} MB, {time_ratio:.2f} × the time",
    ),
    "schedules.py": Benchmark(
        "Periodic against sync on the same work",
        "{periodic_over_sync:.2f} × ({fraction_of_bound:.0%} of the bound); "
        "{periodic_over_sync_all_cores:.2f} × against sync with all cores for each phase",
    ),
    "training_share.py": Benchmark(
        "The quickstart's training time with and without shared prompts",
        "{speedup:.1f} ×: {train_s_unshared:.1f} s to {train_s_shared:.1f} s a step",
    ),
    "ranks.py": Benchmark(
        "A training step by one rank, by two, and by one with the threads of both",
        "two ranks {speedup:.2f} × one; gradient within {max_gradient_error:.0e}",
    ),
    "uneven_ranks.py": Benchmark(
        "Two ranks, one of them slower, take groups by demand: how much of the step each is busy",
        "{slower:.0f} × slower, {groups} groups: {replicate[busy][0]:.0%} and {replicate[busy][1]:.0%} replicated, "
        "{shard_state[busy][0]:.0%} and {shard_state[busy][1]:.0%} with a sharded state",
    ),
    "sharding.py": Benchmark(
        "Publication from four shards against one rank and `full_tensor()`; memory of a rank",
        "{four_over_one:.2f} × one rank's time, `full_tensor()` {full_tensor_over_four:.1f} × that; tensors of a rank "
        "{memory_mb[replicate][tensors_mb]} MB, {memory_mb[shard_state][tensors_mb]} MB, {memory_mb[shard][tensors_mb]} MB",
    ),
    "side_by_side.py": Benchmark("Two quickstarts at the same time against one alone", "{ratio:.2f} × as long"),
    "tri_model.py": Benchmark(
        "Peak memory of one, two and three models",
        "{rows[0][peak_mb]:.0f}, {rows[1][peak_mb]:.0f} and {rows[2][peak_mb]:.0f} MB",
    ),
    "utilisation.py": Benchmark(
        "How busy the cores are over quickstart steps, and what weights cost",
        "cores {cores_busy:.1%} busy; weights {weights_share_of_step:.1%} of a step of {s_per_step:.1f} s",
    ),
    "conductor.py": Benchmark(
        "The conductor without models: CPU per rollout, memory per rollout in flight",
        "{cpu_ms_per_rollout:.2f} ms and {bytes_per_rollout_in_flight:.0f} bytes a rollout, "
        "{num_rollouts_in_flight:,} in flight at {num_engines:,} engines",
    ),
    "dispatch_order.py": Benchmark(
        "Longest expected first against problem order, scripted engines with heavy-tailed lengths",
        "generation {speedup_of_generation:.2f} × as fast",
    ),
    "against_trl.py": Benchmark(
        "A whole step against TRL's GRPOTrainer, without and with KL",
        "{speedup:.2f} × TRL {trl_version} without KL, {speedup_with_kl:.2f} × with KL",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the long forms")
    parser.add_argument("--only", nargs="*", default=list(BENCHMARKS), choices=BENCHMARKS, metavar="SCRIPT")
    options = parser.parse_args()
    RAW.mkdir(exist_ok=True)
    for script in options.only:
        result = run(script, [] if options.full else ["--short"])
        measured = {"measured_on": str(date.today()), "processor": processor(), "result": result}
        raw_path(script).write_text(json.dumps(measured, indent=1) + "\n")
        RESULTS.write_text(report())
    RESULTS.write_text(report())
    print(f"written to {RESULTS}")


def run(script: str, arguments: list[str]) -> dict[str, Any]:
    """The JSON line of a benchmark, or what went wrong."""
    command = [sys.executable, str(HERE / script), *arguments]
    print(f"\n== {script} {' '.join(arguments)}", flush=True)
    started = time.monotonic()
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return {"failed": f"not finished within {DEADLINE_S} s"}
    print(done.stdout, end="", flush=True)
    print(f"({time.monotonic() - started:.0f} s)", flush=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        return {"failed": f"exit code {done.returncode}"}
    return json.loads(lines[-1])


def raw_path(script: str) -> Path:
    return RAW / script.replace(".py", ".json")


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def report() -> str:
    lines = [
        "# Results",
        "",
        "Written by `make bench` from `benchmarks/results/*.json`, which hold every number. fp32, SmolLM2-135M unless said otherwise.",
        "Each script measures both sides in one run, on the same work and threads; ratios count, absolute times depend on the machine.",
        "",
        "| script | what | measured | when, where |",
        "|---|---|---|---|",
    ]
    for script, benchmark in BENCHMARKS.items():
        if raw_path(script).exists():
            measured = json.loads(raw_path(script).read_text())
            where = f"{measured['measured_on']}, {measured['processor']}"
            lines.append(f"| `{script}` | {benchmark.title} | {told(benchmark, measured['result'])} | {where} |")
    if NOTES.exists():
        lines += ["", NOTES.read_text().strip()]
    return "\n".join(lines) + "\n"


def told(benchmark: Benchmark, result: dict[str, Any]) -> str:
    return f"failed: {result['failed']}" if "failed" in result else benchmark.figures.format_map(result)


if __name__ == "__main__":
    main()
