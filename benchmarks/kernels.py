"""Each kernel on and off, by the work it is in: a training pass and generation with SmolLM2-135M, on the same threads.

    python benchmarks/kernels.py            seven turns for each kernel, several minutes
    python benchmarks/kernels.py --short    three turns on less work

The switch POLYRHYTHM_KERNELS turns one kernel off, or all. Both sides are processes with the environment that a run gives
them; they take turns, so that a machine whose speed drifts is as fast for both, and the one that waits takes no core. `ratio` is
the median over turns of the seconds without a kernel to the mean of the two measurements with all of them beside it. What a
kernel is worth depends on the machine: without `product`, products are oneDNN's, where torch has them. JSON last.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from polyrhythm.cluster.cores import process_environment
from polyrhythm.kernels.switch import VARIABLE

MODEL = "smollm2-135m"
SWITCHES = {
    "training pass": ["off:packed", "off:elementwise", "off"],
    "generation": ["off:decode", "off:product", "off:elementwise", "off"],
}
GROUP_SIZE = 8
PROMPT_LENGTH = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer turns on less work")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of every side")
    parser.add_argument("--work", choices=SWITCHES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return answer_turns(options)
    rows = []
    for work, switches in SWITCHES.items():
        with ExitStack() as stack:
            with_all = stack.enter_context(Side(work, "on", options))
            for switch in switches:
                with Side(work, switch, options) as without:
                    rows.append(compare(with_all, without, num_turns=3 if options.short else 7))
                print(f"{work:14} {rows[-1]['without']:24} {rows[-1]['ratio']:.2f} x as long   "
                      f"({rows[-1]['seconds_without']:.2f} s against {rows[-1]['seconds_with']:.2f} s)", flush=True)  # fmt: skip
    print(json.dumps({"summary": summary(rows), "threads": options.threads, "model": MODEL, "rows": rows}))


class Side:
    """A process that does the work whenever it is asked to."""

    def __init__(self, work: str, switch: str, options: argparse.Namespace):
        self.work, self.switch = work, switch
        command = [sys.executable, __file__, "--work", work, "--threads", str(options.threads)]
        self._process = subprocess.Popen(
            command + ["--short"] * options.short, env=process_environment(options.threads) | {VARIABLE: switch},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.seconds()  # compiles, loads and warms up

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(timeout=30)

    def seconds(self) -> float:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def compare(with_all: Side, without: Side, num_turns: int) -> dict[str, Any]:
    beside = [with_all.seconds()]
    alone, ratios = [], []
    for _ in range(num_turns):
        alone.append(without.seconds())
        beside.append(with_all.seconds())
        ratios.append(alone[-1] / statistics.mean(beside[-2:]))
    return {
        "work": with_all.work, "without": without.switch.partition(":")[2] or "all kernels",
        "ratio": statistics.median(ratios), "ratios": ratios,
        "seconds_with": statistics.median(beside), "seconds_without": statistics.median(alone),
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> str:
    parts = (
        f"{work} without " + ", ".join(f"{row['without']} {row['ratio']:.2f} ×" for row in rows if row["work"] == work)
        for work in SWITCHES
    )
    return "; ".join(parts) + " as long"


def answer_turns(options: argparse.Namespace) -> None:
    """The process of a side: a line in asks for a turn, a line out tells its seconds; the first turn is not a measurement."""
    from transformers.utils.logging import disable_progress_bar

    from polyrhythm.weights.pretrained import resolve_model

    disable_progress_bar()
    make = {"training pass": training_pass, "generation": generation}[options.work]
    with asyncio.Runner() as runner:
        turn = make(resolve_model(MODEL), options, runner)
        turn()
        for _ in sys.stdin:
            start = time.perf_counter()
            turn()
            print(time.perf_counter() - start, flush=True)


def training_pass(model_dir: Any, options: argparse.Namespace, _: asyncio.Runner) -> Callable[[], None]:
    """Forward and backward of one row of groups with shared prompts."""
    import torch

    from polyrhythm.training.packing.layout import pack
    from polyrhythm.training.packing.scoring import prepare_model, score
    from polyrhythm.training.policy.accumulate import accumulate_in_place
    from polyrhythm.training.policy.tri_model import load_policy

    torch.set_num_threads(options.threads)
    policy = load_policy(model_dir)
    prepare_model(policy, "always")
    accumulate_in_place(policy)
    prompt = [7 + i for i in range(PROMPT_LENGTH)]
    groups = [(prompt, [prompt[: 64 - 2 * i] for i in range(GROUP_SIZE)]) for _ in range(1 if options.short else 3)]
    (layout,) = pack(groups, share_prompt=True, max_tokens=10**9)

    def turn() -> None:
        policy.zero_grad(set_to_none=False)
        score(policy, layout).logprobs_N.sum().backward()

    return turn


def generation(model_dir: Any, options: argparse.Namespace, runner: asyncio.Runner) -> Callable[[], None]:
    """Completions of several requests, all of the same length."""
    from polyrhythm.config import EngineConfig
    from polyrhythm.engine.embedded.engine import InferenceEngine
    from polyrhythm.messages import GenerateRequest
    from polyrhythm.types import Sampling

    engine = InferenceEngine(
        model_dir, EngineConfig(threads=options.threads, max_batch=4 * GROUP_SIZE), stop_at_eos=False
    )
    runner.run(engine.__aenter__())
    sampling = Sampling(max_tokens=32 if options.short else 128)
    prompt, seeds = [7 + i for i in range(PROMPT_LENGTH)], list(range(GROUP_SIZE))
    requests = [GenerateRequest(f"r{i}", 0, [*prompt, i], seeds, sampling) for i in range(4)]

    async def generate() -> None:
        await asyncio.gather(*map(engine.generate, requests))

    return lambda: runner.run(generate())


if __name__ == "__main__":
    main()
