"""Packed attention by public operators, which run anywhere, and the question whether another kernel computes the same.

No kernel is used before it has agreed with this one, forward and backward, on the device and in the number format of the
model: the first second on an accelerator nobody has tried is a test of it.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from polyrhythm.training.packing.plan import AttentionPlan, Block, causal_segments, span_of

Kernel = Callable[[Tensor, Tensor, Tensor, AttentionPlan, float], Tensor]
"""Queries [1, H, T, D], keys and values [1, Hk, T, D], the row's plan and the scale of the scores, to [1, H, T, D]."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Of a token's output or gradient, in relation to its size; half precision keeps two or three digits."""
_CPU = torch.device("cpu")
# Segments of unequal lengths, a lone completion and a prompt without any: a kernel that aligns its mask at the wrong corner differs.
_BLOCKS = (Block(0, 70, (70, 110, 115), (40, 5, 1)), Block(116, 2, (118,), (3,)), Block(121, 4, (), ()))
_NUM_TOKENS = 125
_RESULTS = ("the output", "the gradient of queries", "the gradient of keys", "the gradient of values")


def looped_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """A loop over completions with the prompt's keys in front of their own."""
    attend = functools.partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=True)
    pieces: list[Tensor] = []
    for block in plan.blocks:
        first, *others = causal_segments(block)
        prompt = span_of(*first)
        pieces.append(attend(query[:, :, prompt], key[:, :, prompt], value[:, :, prompt], is_causal=True))
        for start, length in others:
            own = span_of(start, length)
            keys, values = (torch.cat([row[:, :, prompt], row[:, :, own]], dim=2) for row in (key, value))
            pieces.append(attend(query[:, :, own], keys, values, attn_mask=causal_lower_right(length, keys.size(2))))
    return torch.cat(pieces, dim=2)


def disagreement(
    kernel: Kernel,
    *,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float64,
    head_dim: int = 8,
    repeats: int = 2,
) -> str | None:
    """What a kernel computes otherwise than the loop does in double precision on the host, or None."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, _NUM_TOKENS, head_dim) for heads in (2 * repeats, 2, 2, 2 * repeats)]
    numbers = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    expected = _results(looped_attention, [number.to(torch.float64) for number in numbers])
    try:
        computed = [result.cpu() for result in _results(kernel, [number.to(device) for number in numbers])]
    except Exception as error:  # whatever it is, the kernel is of no use here
        return f"it raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    for name, ours, theirs in zip(_RESULTS, computed, expected, strict=True):
        error = _error(ours.to(torch.float64), theirs)
        if not error <= TOLERANCES[dtype]:  # no number is not less either
            return f"{name} is off by {error:.2g} of its size, where {TOLERANCES[dtype]:g} is allowed"
    return None


def _error(ours: Tensor, theirs: Tensor) -> float:
    """Of the worst token, over all heads, in relation to its size and the usual one: one wrong token of many is found."""
    sizes_T, gaps_T = (tensor.transpose(1, 2).flatten(2).norm(dim=-1) for tensor in (theirs, ours - theirs))
    return (gaps_T / (sizes_T + sizes_T.mean())).max().item()


@torch.enable_grad()
def _results(kernel: Kernel, numbers: list[Tensor]) -> list[Tensor]:
    *inputs, grad_out = numbers
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = kernel(leaves[0], leaves[1], leaves[2], AttentionPlan(_BLOCKS), inputs[0].size(-1) ** -0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
