"""The embedded engine against transformers `generate`, vLLM on CPU and the decoding roofline: same prompts, same lengths,
same threads. JSON last.

Each side runs in a process of its own, one after the other, several rounds; the fastest round of each counts. Ours is
measured over HTTP from the requests to the last reply, prefill included. transformers gets all sequences as one batch. The
roofline is the matrix products of as many decoding steps alone, head included, with plain or packed weights, whichever is faster.
`of_roofline` compares tokens per second end to end with it, `decoding_of_roofline` those after the first token of each
completion.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import environments

from polyrhythm.cluster.cores import process_environment
from polyrhythm.http.credentials import Credentials
from polyrhythm.weights.pretrained import resolve_model

DEADLINE_S = 1800.0
CREDENTIALS = Credentials({"generate": "benchmark", "admin": "benchmark-admin"})
Figures = dict[str, float]


def main() -> None:
    options = parse_options()
    if options.side:
        print(json.dumps(SIDES[options.side](options)))
        return
    options.model = str(resolve_model(options.model))
    names = ["ours", "hf_generate", "roofline"]
    if options.vllm_python:
        names.append("vllm")
    best: dict[str, Figures] = {}
    for round_number in range(options.repeats):
        for name in names:
            figures = run_side(name, options)
            print(f"round {round_number + 1}: {name} {figures}", flush=True)
            if name not in best or figures["tokens_per_s"] > best[name]["tokens_per_s"]:
                best[name] = figures
    print(json.dumps(summary(best, options)))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="built-in name or folder (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=4, help="prompts (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="completions of each (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--completion", type=int, default=64, help="tokens of a completion (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of every side")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the fastest counts (default: %(default)s)")
    vllm = environments.ENVIRONMENTS["vllm"]
    made = vllm.python if vllm.is_made else None
    parser.add_argument(
        "--vllm-python", type=Path, default=made, help="Python that has vLLM (default: its environment)"
    )
    parser.add_argument("--short", action="store_true", help="one round, otherwise the same work")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.short:
        options.repeats = 1
    return options


def run_side(name: str, options: argparse.Namespace) -> Figures:
    """The figures of one side, measured by a process of its own."""
    work = [
        f"--model={options.model}", f"--groups={options.groups}", f"--group-size={options.group_size}",
        f"--prompt={options.prompt}", f"--completion={options.completion}", f"--threads={options.threads}",
    ]  # fmt: skip
    command = [sys.executable, __file__, f"--side={name}", *work]
    if name == "vllm":
        command = [str(options.vllm_python), str(Path(__file__).with_name("vllm_side.py")), *work]
    # Ours and its bound run as the engine processes of a run do; the others with their own defaults.
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    if name in ("ours", "roofline"):
        environment = process_environment(options.threads)
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, timeout=DEADLINE_S, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{name} failed with exit code {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def summary(best: dict[str, Figures], options: argparse.Namespace) -> dict[str, Any]:
    rates = {name: figures["tokens_per_s"] for name, figures in best.items()}
    decoding = best["ours"]["decoding_tokens_per_s"]
    return {
        "over_hf_generate": round(rates["ours"] / rates["hf_generate"], 3),
        "over_vllm": round(rates["ours"] / rates["vllm"], 3) if "vllm" in rates else None,
        "of_roofline": round(rates["ours"] / rates["roofline"], 3),
        "decoding_of_roofline": round(decoding / rates["roofline"], 3),
        "tokens_per_s": {**rates, "ours_decoding": decoding, "vllm": rates.get("vllm")},
        "threads": options.threads,
        "model": Path(options.model).name,
        "groups": options.groups,
        "group_size": options.group_size,
        "prompt": options.prompt,
        "completion": options.completion,
    }


def prompts_of(options: argparse.Namespace, call: int) -> list[list[int]]:
    """The prompts of a call; other ones in every call."""
    config = json.loads((Path(options.model) / "config.json").read_text())
    rng = random.Random(call)
    return [[rng.randrange(config["vocab_size"]) for _ in range(options.prompt)] for _ in range(options.groups)]


def measure_ours(options: argparse.Namespace) -> Figures:
    return asyncio.run(_measure_ours(options))


async def _measure_ours(options: argparse.Namespace) -> Figures:
    import aiohttp
    from aiohttp import web

    from polyrhythm import messages
    from polyrhythm.config import EngineConfig
    from polyrhythm.engine.embedded.engine import InferenceEngine
    from polyrhythm.engine.server import make_server
    from polyrhythm.types import Sampling

    num_rows = options.groups * options.group_size
    config = EngineConfig(threads=options.threads, max_batch=num_rows)

    def requests_of(call: int) -> list[messages.GenerateRequest]:
        sampling = Sampling(max_tokens=options.completion)
        seeds = [[group * options.group_size + i for i in range(options.group_size)] for group in range(options.groups)]
        prompts = prompts_of(options, call)
        return [messages.GenerateRequest(str(g), 0, prompts[g], seeds[g], sampling) for g in range(options.groups)]

    async with InferenceEngine(Path(options.model), config, stop_at_eos=False) as engine:
        runner = web.AppRunner(make_server(engine, CREDENTIALS, Path(options.model), "model").app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/generate"
        headers = {"Authorization": f"Bearer {CREDENTIALS['generate']}", "Content-Type": messages.CONTENT_TYPE}
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)

        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

            async def post(request: messages.GenerateRequest) -> messages.GenerateReply:
                async with session.post(url, data=messages.encode(request), raise_for_status=True) as reply:
                    return messages.decode(await reply.read(), messages.GenerateReply)

            await asyncio.gather(*map(post, requests_of(0)))
            started = time.perf_counter()
            replies = await asyncio.gather(*map(post, requests_of(1)))
            seconds = time.perf_counter() - started
        await runner.cleanup()

        steps: dict[float, int] = {}

        def count(tokens: list) -> None:
            steps[time.perf_counter()] = len(tokens)

        await asyncio.gather(*(engine.generate(request, count) for request in requests_of(2)))
    num_tokens = sum(len(completion.token_ids) for reply in replies for completion in reply.completions)
    assert num_tokens == num_rows * options.completion
    # The first tokens come out of the prompts; what follows is decoding alone.
    times = sorted(steps)
    num_decoded = num_rows * (options.completion - 1)
    return {
        "tokens_per_s": round(num_tokens / seconds, 2),
        "decoding_tokens_per_s": round(num_decoded / (times[-1] - times[options.groups - 1]), 2),
        "seconds": round(seconds, 3),
    }


def measure_hf_generate(options: argparse.Namespace) -> Figures:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    seconds, num_tokens = 0.0, 0
    for call, length in ((0, 4), (1, options.completion)):
        prompts = torch.tensor(prompts_of(options, call)).repeat_interleave(options.group_size, 0)
        started = time.perf_counter()
        output = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=length,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        num_tokens = output[:, options.prompt :].numel()
    assert num_tokens == options.groups * options.group_size * options.completion
    return {"tokens_per_s": round(num_tokens / seconds, 2), "seconds": round(seconds, 3)}


def measure_roofline(options: argparse.Namespace) -> Figures:
    """The matrix products of all decoding steps, nothing between them: sustained like the work it bounds."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    from polyrhythm.engine.embedded.projection import Projection

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    weights = [module.weight.data for module in model.modules() if isinstance(module, torch.nn.Linear)]
    packed = [Projection(weight) for weight in weights]
    num_rows = options.groups * options.group_size
    inputs = {width: torch.randn(num_rows, width) for width in {weight.shape[1] for weight in weights}}

    def plain_step() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    def packed_step() -> None:
        for projection in packed:
            projection(inputs[projection.weight.shape[1]])

    seconds: dict[Callable[[], None], float] = {}
    with torch.inference_mode():
        for step in (plain_step, packed_step):
            step()
            started = time.perf_counter()
            for _ in range(options.completion):
                step()
            seconds[step] = (time.perf_counter() - started) / options.completion
    return {
        "tokens_per_s": round(num_rows / min(seconds.values()), 2),
        "plain_s": round(seconds[plain_step], 4),
        "packed_s": round(seconds[packed_step], 4),
    }


SIDES = {"ours": measure_ours, "hf_generate": measure_hf_generate, "roofline": measure_roofline}

if __name__ == "__main__":
    main()
