"""Chunked log-probabilities against full logits: time and extra memory of forward and backward.

    python benchmarks/logprobs.py            1,536 rows, vocabulary 152k, width 512
    python benchmarks/logprobs.py --short    96 rows, vocabulary 20k

The last line is JSON: seconds of both and their ratio, peak extra memory of both (each in a process of its own).
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from measuring import peak_megabytes_of
from torch import Tensor

from polyrhythm.training.packing.logprobs import token_logprobs


@dataclass(frozen=True)
class Size:
    rows: int
    vocabulary: int
    width: int
    threads: int


def chunked(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor) -> Tensor:
    return token_logprobs(hidden_NH, weight_VH, target_N)[0]


def full_logits(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor) -> Tensor:
    return -F.cross_entropy(hidden_NH @ weight_VH.T, target_N, reduction="none")


METHODS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"chunked": chunked, "full_logits": full_logits}


def inputs(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    torch.set_num_threads(size.threads)
    draw = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(size.rows, size.width, generator=draw).requires_grad_()
    weight_VH = torch.randn(size.vocabulary, size.width, generator=draw).mul_(0.05).requires_grad_()
    return hidden_NH, weight_VH, torch.randint(0, size.vocabulary, (size.rows,), generator=draw)


def seconds(method: str, hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor) -> float:
    hidden_NH.grad = weight_VH.grad = None
    start = time.perf_counter()
    METHODS[method](hidden_NH, weight_VH, target_N).sum().backward()
    return time.perf_counter() - start


def extra_megabytes(method: str, size: Size) -> float:
    """Peak resident memory of forward and backward above what the inputs take."""
    arguments = inputs(size)
    return peak_megabytes_of(lambda: seconds(method, *arguments))


def largest_differences(size: Size) -> tuple[float, float]:
    """Of log-probabilities, and of gradients relative to the largest one."""
    values: list[Tensor] = []
    gradients: list[Tensor] = []
    arguments = inputs(size)
    for method in METHODS.values():
        logprobs_N = method(*arguments)
        values.append(logprobs_N.detach())
        gradients.append(torch.autograd.grad(logprobs_N.sum(), arguments[1])[0])
    relative = (gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max()
    return (values[0] - values[1]).abs().max().item(), relative.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a small case in a few seconds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rows, vocabulary = (96, 20_000) if arguments.short else (1_536, 151_936)
    size = Size(rows, vocabulary, width=512, threads=arguments.threads)
    result: dict[str, float] = {"rows": rows, "vocabulary": vocabulary, "width": 512, "threads": arguments.threads}
    # A fresh process for each peak: the allocator keeps what an earlier pass has touched.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        for method in METHODS:
            result[f"{method}_extra_mb"] = round(processes.submit(extra_megabytes, method, size).result(timeout=600), 1)
    result["max_logprob_diff"], result["max_gradient_error"] = largest_differences(size)
    tensors = inputs(size)
    times = [{method: seconds(method, *tensors) for method in METHODS} for _ in range(arguments.repeats)]
    for method in METHODS:
        result[f"{method}_s"] = round(min(turn[method] for turn in times), 3)
    result["time_ratio"] = round(result["chunked_s"] / result["full_logits_s"], 3)
    for method in METHODS:
        print(f"{method:12} {result[f'{method}_s']:7.2f} s {result[f'{method}_extra_mb']:8.0f} MB extra")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
