"""Run the benchmarks one after the other and write benchmarks/RESULTS.md. Each measures both sides in one run and prints JSON last."""

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

HERE = Path(__file__).parent
NOTES = HERE / "NOTES.md"
RESULTS = HERE / "RESULTS.md"
DEADLINE_S = 3600

BENCHMARKS = {
    "engine.py": "The embedded engine against transformers `generate`, vLLM on CPU (if its environment is there) and the decoding roofline",
    "shared_prompt.py": "Forward and backward with shared prompts against well-packed unshared ones",
    "logprobs.py": "Log-probabilities without logits, vocabulary of 152k",
    "schedules.py": "Periodic against sync on the same work",
    "training_share.py": "The quickstart's training time with and without shared prompts",
    "ranks.py": "A training step by one rank, by two, and by one with the threads of both",
    "tri_model.py": "Peak memory of one, two and three models",
    "utilisation.py": "How busy the cores are over quickstart steps, and what weights cost",
    "conductor.py": "The conductor without models: CPU per rollout, memory per rollout in flight",
    "dispatch_order.py": "Longest expected first against problem order, scripted engines with heavy-tailed lengths",
    "against_trl.py": "A whole step against TRL's GRPOTrainer, without and with KL",
}


@dataclass(frozen=True)
class Result:
    origin: str
    """When and where it was measured."""
    line: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the long forms")
    parser.add_argument("--only", nargs="*", default=list(BENCHMARKS), choices=BENCHMARKS, metavar="SCRIPT")
    options = parser.parse_args()
    results = read_results()
    for script in options.only:
        results[script] = Result(
            f"Measured on {date.today()}: {processor()}.", run(script, [] if options.full else ["--short"])
        )
        RESULTS.write_text(report(results))
    print(f"written to {RESULTS}")


def run(script: str, arguments: list[str]) -> str:
    """The JSON line of a benchmark, or what went wrong."""
    command = [sys.executable, str(HERE / script), *arguments]
    print(f"\n== {script} {' '.join(arguments)}", flush=True)
    started = time.monotonic()
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return json.dumps({"failed": f"not finished within {DEADLINE_S} s"})
    print(done.stdout, end="", flush=True)
    print(f"({time.monotonic() - started:.0f} s)", flush=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        return json.dumps({"failed": f"exit code {done.returncode}"})
    return lines[-1]


def read_results() -> dict[str, Result]:
    """What RESULTS.md holds already, so that one benchmark can be run again alone."""
    results: dict[str, Result] = {}
    script = origin = ""
    for line in RESULTS.read_text().splitlines() if RESULTS.exists() else []:
        if line.startswith("## "):
            script, origin = line.removeprefix("## ").strip("`"), ""
        elif line.startswith("Measured on "):
            origin = line
        elif line.startswith("{") and script in BENCHMARKS:
            results[script] = Result(origin, line)
    return results


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def report(results: dict[str, Result]) -> str:
    lines = [
        "# Results",
        "",
        "Measured by the scripts of this folder (`make bench` runs them all), fp32, SmolLM2-135M unless said otherwise.",
        "Every benchmark measures both sides in one run, on the same work; ratios count, absolute times depend on the machine.",
        "",
    ]
    for script, title in BENCHMARKS.items():
        if script in results:
            result = results[script]
            lines += [f"## `{script}`", "", title, "", result.origin, "", "```json", result.line, "```", ""]
    if NOTES.exists():
        lines += [NOTES.read_text().strip(), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
