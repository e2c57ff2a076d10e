"""Attention over a packed row: a prompt is computed once and every completion attends to it and to itself.

Registered with transformers' `AttentionInterface`; the row's `AttentionPlan` travels with each call of the model. No
mask tensor exists, and on a CPU no key or value is copied. All kernels compute the same function:

    runs      causal attention inside each prompt and inside each completion
    crosses   every completion token over the whole prompt, merged with its run by the log-sum-exp of both
"""

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from polyrhythm.errors import RunError, UserError
from polyrhythm.kernels.packed_attention import PackedAttention, packed_attention_for
from polyrhythm.kernels.tensors import with_dense_heads
from polyrhythm.training.packing.compiled_attention import compiled_attention
from polyrhythm.training.packing.device_attention import kernel_of_device
from polyrhythm.training.packing.explicit_attention import Extras, explicit_attention
from polyrhythm.training.packing.plan import AttentionPlan
from polyrhythm.training.packing.reference_attention import Kernel, disagreement, looped_attention

IMPLEMENTATION = "polyrhythm_packed"

log = logging.getLogger(__name__)

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _MergedFlash(torch.autograd.Function):
    """The CPU kernel: flash attention of every piece, merged by log-sum-exp.

    The backward pass of a piece is the flash backward with the *merged* output and log-sum-exp of its queries: then
    exp(scores - lse) are the final attention weights, and the pieces' gradients simply add up.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        query, key, value = map(with_dense_heads, (query, key, value))
        _, num_heads, num_tokens, head_dim = query.shape
        out = query.new_empty(1, num_tokens, num_heads, head_dim).transpose(1, 2)
        wide = torch.promote_types(query.dtype, torch.float32)
        lse = query.new_empty(1, num_tokens, num_heads, dtype=wide).transpose(1, 2)
        for run in plan.runs:
            run_out, run_lse = _flash_forward(run.of(query), run.of(key), run.of(value), 0.0, True, scale=scale)
            run.of(out).copy_(run_out)
            run.of(lse).copy_(run_lse)
        for cross in plan.crosses:
            prompt_out, prompt_lse = _flash_forward(
                cross.queries.of(query), cross.keys_of(key), cross.keys_of(value), 0.0, False, scale=scale
            )
            own_out, own_lse = cross.queries.of(out), cross.queries.of(lse)
            own_out.lerp_(prompt_out, torch.sigmoid(prompt_lse - own_lse).unsqueeze(-1).to(own_out.dtype))
            own_lse.copy_(torch.logaddexp(prompt_lse, own_lse))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, lse = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        grad_query, grad_key, grad_value = (torch.empty_like(tensor) for tensor in (query, key, value))
        for run in plan.runs:
            pieces = (run.of(tensor) for tensor in (grad_out, query, key, value, out, lse))
            grads = _flash_backward(*pieces, 0.0, True, scale=ctx.scale)
            for total, piece in zip((grad_query, grad_key, grad_value), grads, strict=True):
                run.of(total).copy_(piece)
        for cross in plan.crosses:
            piece_query, piece_key, piece_value = _flash_backward(
                cross.queries.of(grad_out),
                cross.queries.of(query),
                cross.keys_of(key),
                cross.keys_of(value),
                cross.queries.of(out),
                cross.queries.of(lse),
                0.0,
                False,
                scale=ctx.scale,
            )
            cross.queries.of(grad_query).add_(piece_query)
            cross.add_to_keys_of(grad_key, piece_key)
            cross.add_to_keys_of(grad_value, piece_value)
        return grad_query, grad_key, grad_value, None, None


def merged_flash_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """CPU: [1, H, T, D] and [1, Hk, T, D] to [1, H, T, D] by the log-sum-exp merge over private flash operators."""
    return _MergedFlash.apply(query, key, value, plan, scale)  # pyright: ignore[reportReturnType]


def cpu_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """The compiled kernel in fp32 where this machine can have it, else the merge."""
    kernel = packed_attention_for(query, key, value)
    if kernel is None or not _is_sound(kernel, query.size(-1), query.size(1) // key.size(1)):
        return merged_flash_attention(query, key, value, plan, scale)
    return compiled_attention(query, key, value, plan.blocks, scale, kernel)


@functools.cache
def _is_sound(kernel: PackedAttention, head_dim: int, repeats: int) -> bool:
    def attend(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        return compiled_attention(query, key, value, plan.blocks, scale, kernel)

    why_not = disagreement(attend, head_dim=head_dim, repeats=repeats, dtype=torch.float32)
    if why_not is None:
        return True
    log.warning("the compiled attention kernel fails its self-test: %s. Torch operators are used.", why_not)
    return False


@functools.cache
def kernel_for(device: torch.device, dtype: torch.dtype, head_dim: int, repeats: int) -> Kernel:
    """The kernel for a device, a number format and a shape of heads, chosen once; a device without one is refused.

    An accelerator's own kernel must agree with the loop there, and so must the loop itself.
    """
    if device.type == "cpu":
        return _cpu_kernel_for(dtype)
    tested = functools.partial(disagreement, device=device, dtype=dtype, head_dim=head_dim, repeats=repeats)
    kernel = kernel_of_device(device, dtype)
    if kernel is not None:
        why_not = tested(kernel)
        if why_not is None:
            return kernel
        log.warning(
            "%s on %s in %s fails its self-test: %s. A slower loop over completions is used.",
            kernel.__name__, device, dtype, why_not,
        )  # fmt: skip
    if why_not := tested(looped_attention):
        raise UserError(
            f'attention in {dtype} on {device} fails its self-test: {why_not}: use device="cpu", and report this'
        )
    return looped_attention


@functools.cache
def _cpu_kernel_for(dtype: torch.dtype) -> Kernel:
    why_not = disagreement(merged_flash_attention, dtype=torch.float64 if dtype == torch.float32 else dtype)
    if why_not is None:
        return cpu_attention
    log.warning(
        "this PyTorch's private attention operators fail their self-test: %s. A slower public one is used.", why_not
    )
    return looped_attention


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_plan: AttentionPlan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: [1, H, T, D] in, [1, T, H, D] out."""
    if attention_plan is None:
        raise RunError("packed attention was called without a layout: use polyrhythm.training.packing.scoring.score")
    if attention_mask is not None:
        raise RunError("packed attention does not know the attention mask of this model")
    attention_plan.num_calls += 1
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    window = sliding_window if sliding_window and sliding_window < attention_plan.longest_sequence else None
    extras = Extras(window, softcap or None, dropout, s_aux)
    if dropout and attention_plan.crosses:
        raise RunError(f'a shared prompt met dropout={dropout}: set training.share_prompt = "never"')
    if not extras.are_none:
        return explicit_attention(query, key, value, attention_plan, scale, extras).transpose(1, 2), None
    if query.size(-1) != value.size(-1):
        return looped_attention(query, key, value, attention_plan, scale).transpose(1, 2), None
    kernel = kernel_for(query.device, query.dtype, query.size(-1), query.size(1) // key.size(1))
    return kernel(query, key, value, attention_plan, scale).transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, packed_attention)
