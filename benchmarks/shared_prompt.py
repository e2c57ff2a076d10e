"""Forward and backward of SmolLM2-135M with shared prompts against unshared ones, well packed and without padding.

    python benchmarks/shared_prompt.py            four shapes, several minutes
    python benchmarks/shared_prompt.py --short    the two small shapes, one group each

Both sides score the same groups in one row, through the same attention kernel, which batches the equal-length sequences of
the unshared row in one call. As many groups share a row as fit a budget of 4,096 unshared tokens, the trainer's default, and at
least one. In every turn the unshared pass stands between shared ones, for ratios above two of about the same time together, so
that a machine whose speed drifts is as fast for both sides. A turn's ratio is that of the unshared pass to the mean of its shared
ones; `speedup` is the median of the turns, which are all told. Seconds are medians of their own. Peak memory is measured in a
process of its own for each side. Both sides have what a run's trainer process has: its environment, and gradients that are added
in place. rho counts all tokens of the groups, with prompts repeated and shared. `row_ratio` counts those of the rows, which on
both sides leave out the last token of each completion, because it predicts nothing. `arithmetic_ratio` is what the speedup would
be if every operation cost the same: the head is not shared. JSON last.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from measuring import peak_megabytes_of, run_as_a_trainer_does
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from polyrhythm.training.packing.layout import Layout, PromptAndCompletions, pack
from polyrhythm.training.packing.scoring import prepare_model, score
from polyrhythm.training.policy.accumulate import accumulate_in_place
from polyrhythm.weights.pretrained import resolve_model

TOKEN_BUDGET = 4_096


@dataclass(frozen=True)
class Shape:
    prompt: int
    group: int
    completion: int

    @property
    def num_groups(self) -> int:
        return max(1, TOKEN_BUDGET // (self.group * (self.prompt + self.completion)))

    @property
    def rho(self) -> float:
        """How many times more tokens a group has when every completion carries its own copy of the prompt."""
        own = self.group * self.completion
        return (self.group * self.prompt + own) / (self.prompt + own)


SHAPES = [Shape(512, 8, 64), Shape(200, 8, 32), Shape(51, 8, 4), Shape(128, 8, 512)]
SHORT_SHAPES = [Shape(200, 8, 32), Shape(51, 8, 4)]


def make_groups(shape: Shape, num_groups: int, vocab_size: int) -> list[PromptAndCompletions]:
    draw = torch.Generator().manual_seed(0)

    def tokens(length: int) -> list[int]:
        return torch.randint(0, vocab_size, (length,), generator=draw).tolist()

    return [(tokens(shape.prompt), [tokens(shape.completion) for _ in range(shape.group)]) for _ in range(num_groups)]


def load(model: str, threads: int) -> PreTrainedModel:
    torch.set_num_threads(threads)
    policy = AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=torch.float32)
    prepare_model(policy, "always")
    accumulate_in_place(policy)
    return policy


def row_of(groups: list[PromptAndCompletions], share_prompt: bool) -> Layout:
    (layout,) = pack(groups, share_prompt=share_prompt, max_tokens=10**9)
    return layout


def forward_backward(policy: PreTrainedModel, layout: Layout) -> tuple[float, Tensor]:
    """Seconds and log-probabilities; the gradients stay in the policy."""
    policy.zero_grad(set_to_none=False)  # as in a trainer, whose micro-batches add to gradients that exist
    start = time.perf_counter()
    logprobs_N = score(policy, layout).logprobs_N
    (logprobs_N * torch.cos(torch.arange(layout.num_targets))).sum().backward()
    return time.perf_counter() - start, logprobs_N.detach()


def gradients(policy: PreTrainedModel) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None])


def extra_megabytes(model: str, threads: int, shape: Shape, num_groups: int, share_prompt: bool) -> float:
    """Peak resident memory of one pass above what the loaded model takes, gradients included."""
    policy = load(model, threads)
    layout = row_of(make_groups(shape, num_groups, policy.config.vocab_size), share_prompt)
    return peak_megabytes_of(lambda: forward_backward(policy, layout))


def arithmetic(policy: PreTrainedModel, layout: Layout) -> float:
    """Operations of a forward and backward pass, in units of one multiplication and addition forward."""
    config: Any = policy.config
    trunk = sum(weight.numel() for name, weight in policy.named_parameters() if "proj" in name)
    head = config.vocab_size * config.hidden_size
    pairs = sum(
        block.prompt_length**2 / 2 + sum(own * block.prompt_length + own**2 / 2 for own in block.completion_lengths)
        for block in layout.blocks
    )
    attention = 2 * config.num_hidden_layers * config.hidden_size * pairs
    return 3 * (trunk * layout.num_tokens + head * layout.predictor_M.numel() + attention)


@dataclass(frozen=True)
class Turn:
    """Seconds of an unshared pass, and of the shared ones before and after it."""

    unshared: float
    shared: list[float]

    @property
    def ratio(self) -> float:
        return self.unshared / statistics.fmean(self.shared)


def take_turn(policy: PreTrainedModel, shared: Layout, unshared: Layout) -> Turn:
    num_shared = max(1, round(unshared.num_tokens / shared.num_tokens / 2))
    before = [forward_backward(policy, shared)[0] for _ in range(num_shared)]
    between = forward_backward(policy, unshared)[0]
    after = [forward_backward(policy, shared)[0] for _ in range(num_shared)]
    return Turn(between, before + after)


def measure(policy: PreTrainedModel, shape: Shape, num_groups: int, repeats: int) -> dict[str, Any]:
    groups = make_groups(shape, num_groups, policy.config.vocab_size)
    shared, unshared = row_of(groups, True), row_of(groups, False)
    _, shared_N = forward_backward(policy, shared)
    shared_gradients = gradients(policy)
    _, unshared_N = forward_backward(policy, unshared)
    error = (shared_gradients - gradients(policy)).norm() / gradients(policy).norm()
    turns = [take_turn(policy, shared, unshared) for _ in range(repeats)]
    shared_times = [seconds for turn in turns for seconds in turn.shared]
    unshared_times = [turn.unshared for turn in turns]
    return {
        "prompt": shape.prompt,
        "group": shape.group,
        "completion": shape.completion,
        "groups_in_row": num_groups,
        "rho": round(shape.rho, 3),
        "row_ratio": round(unshared.num_tokens / shared.num_tokens, 3),
        "arithmetic_ratio": round(arithmetic(policy, unshared) / arithmetic(policy, shared), 3),
        "speedup": round(statistics.median(turn.ratio for turn in turns), 3),
        "speedup_of_turns": [round(turn.ratio, 3) for turn in turns],
        "shared_s": round(statistics.median(shared_times), 3),
        "unshared_s": round(statistics.median(unshared_times), 3),
        "max_logprob_diff": (shared_N - unshared_N).abs().max().item(),
        "max_gradient_error": error.item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="two small shapes, one group each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=6, help="turns (default: %(default)s; 1 in the short form)")
    parser.add_argument("--model", default="smollm2-135m", help="a local folder, a hub id or a built-in name")
    parser.add_argument("--shape", action="append", metavar="P,G,R", help="other shapes: prompt,group,completion")
    arguments = parser.parse_args()
    run_as_a_trainer_does(arguments.threads)
    shapes = SHORT_SHAPES if arguments.short else SHAPES
    if arguments.shape:
        shapes = [Shape(*map(int, shape.split(","))) for shape in arguments.shape]
    policy = load(arguments.model, arguments.threads)
    rows: list[dict[str, Any]] = []
    # A fresh process for each peak: the allocator keeps what an earlier pass has touched.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        for shape in shapes:
            num_groups = 1 if arguments.short else shape.num_groups
            row = measure(policy, shape, num_groups, 1 if arguments.short else arguments.repeats)
            for side, share_prompt in (("shared", True), ("unshared", False)):
                task = (arguments.model, arguments.threads, shape, num_groups, share_prompt)
                row[f"{side}_peak_mb"] = round(processes.submit(extra_megabytes, *task).result(timeout=900))
            rows.append(row)
            print(
                f"({shape.prompt}, {shape.group}, {shape.completion}) x {num_groups}: {row['speedup']:.2f} times faster, "
                f"{row['speedup'] / row['rho']:.2f} of rho {row['rho']:.2f}, "
                f"{row['speedup'] / row['arithmetic_ratio']:.2f} of the arithmetic; {row['shared_s']:.1f} s against "
                f"{row['unshared_s']:.1f} s, {row['shared_peak_mb']} MB against {row['unshared_peak_mb']} MB",
                flush=True,
            )
    print(json.dumps({"threads": arguments.threads, "rows": rows}))


if __name__ == "__main__":
    main()
