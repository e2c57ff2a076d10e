"""Weight gradients added where they belong, in the matrix product that computes them.

Autograd computes a weight's gradient in fresh memory and then adds it to the sum. With many small micro-batches that is a
second pass over as much memory as the model has, for every one of them. Here `grad += dY^T X` is one operation.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def accumulate_in_place(model: nn.Module) -> None:
    """Make the linear layers and embeddings of a model add their weights' gradients in place."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.requires_grad:
            module.forward = MethodType(_linear_forward, module)
        elif type(module) is nn.Embedding and module.weight.requires_grad and not _is_special(module):
            module.forward = MethodType(_embedding_forward, module)


def adds_in_place(module: nn.Linear) -> bool:
    """Whether `accumulate_in_place` has seen this layer."""
    return getattr(module.forward, "__func__", None) is _linear_forward


def _is_special(module: nn.Embedding) -> bool:
    return module.max_norm is not None or module.scale_grad_by_freq or module.sparse


def _linear_forward(module: nn.Linear, inputs: Tensor) -> Tensor:
    return _Linear.apply(inputs, module.weight, module.bias)


def _embedding_forward(module: nn.Embedding, token_ids: Tensor) -> Tensor:
    return _Embedding.apply(token_ids, module.weight, module.padding_idx)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight = weight  # the parameter itself: checkpointing would hand back a copy without its gradient
        ctx.has_bias = bias is not None
        return F.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (gradient,) = gradients
        (inputs,), weight = ctx.saved_tensors, ctx.weight
        rows, total = gradient.flatten(0, -2), gradient_of(weight)
        total.addmm_(rows.t().to(total.dtype), inputs.flatten(0, -2).to(total.dtype))
        inputs_gradient = gradient @ weight if ctx.needs_input_grad[0] else None
        return inputs_gradient, None, rows.sum(0) if ctx.has_bias else None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token_ids: Tensor, weight: Tensor, padding_index: int | None) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.weight = weight
        ctx.padding_index = padding_index
        return F.embedding(token_ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (token_ids,), weight = ctx.saved_tensors, ctx.weight
        rows, ids = gradients[0].flatten(0, -2), token_ids.flatten()
        if ctx.padding_index is not None:
            rows = rows.masked_fill((ids == ctx.padding_index).unsqueeze(1), 0)
        total = gradient_of(weight)
        total.index_add_(0, ids, rows.to(total.dtype))
        return None, None, None


def gradient_of(weight: Tensor) -> Tensor:
    """The sum so far, zeros if there is none."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    return weight.grad


def sum_in_fp32(weight: Tensor) -> None:
    """Of a weight of fewer digits: what autograd computes in its format, as of norms and biases, is added up in fp32, too."""
    weight.grad_dtype = torch.float32
