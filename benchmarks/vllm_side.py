"""vLLM's side of engine.py, run by the Python of its own environment: the same work through the offline `LLM` class.

Prints one line of JSON last. Nothing of this project is imported: it is not installed there.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

KV_CACHE_GB = 2
# Only whole blocks of a prompt are shared. The default on a CPU, 128, shares 128 of 200 tokens and is a third slower here.
BLOCK_SIZE = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--completion", type=int, default=64, help="tokens of a completion (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        # Again, with what the loader, torch and vLLM read before the first line of Python.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment(options.threads))
    print(json.dumps(measure(options)))


def environment(num_threads: int) -> dict[str, str]:
    """What vLLM's manual recommends for a CPU, as far as its environment holds it."""
    intel_openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    return {
        "LD_PRELOAD": str(intel_openmp) if intel_openmp.exists() else "",
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would keep one of two cores for the process that asks
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GB),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }


def measure(options: argparse.Namespace) -> dict[str, object]:
    import vllm

    llm = vllm.LLM(
        model=options.model, dtype="float32", enforce_eager=True, enable_prefix_caching=True,
        max_model_len=options.prompt + options.completion, max_num_seqs=options.groups * options.group_size,
        block_size=BLOCK_SIZE,
    )  # fmt: skip
    generate(llm, prompts_of(options, call=0), options)
    # New prompts, so that a prompt is shared within its group and by nobody else.
    num_tokens, seconds = generate(llm, prompts_of(options, call=1), options)
    return {
        "tokens_per_s": round(num_tokens / seconds, 2),
        "seconds": round(seconds, 3),
        "num_tokens": num_tokens,
        "version": vllm.__version__,
        "threads": options.threads,
    }


def generate(llm: Any, prompts: list[list[int]], options: argparse.Namespace) -> tuple[int, float]:
    """Number of generated tokens and the seconds from the prompts to the last of them."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            n=options.group_size, seed=index, temperature=1.0, max_tokens=options.completion, ignore_eos=True,
            logprobs=0,  # of the sampled token alone, which training needs
            detokenize=False,
        )
        for index in range(len(prompts))
    ]  # fmt: skip
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    return sum(len(completion.token_ids) for output in outputs for completion in output.outputs), seconds


def prompts_of(options: argparse.Namespace, call: int) -> list[list[int]]:
    """The prompts that engine.py gives the other sides in this call."""
    config = json.loads((Path(options.model) / "config.json").read_text())
    rng = random.Random(call)
    return [[rng.randrange(config["vocab_size"]) for _ in range(options.prompt)] for _ in range(options.groups)]


if __name__ == "__main__":
    main()
