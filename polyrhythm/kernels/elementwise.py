"""RMS norm, SwiGLU and softmax by `elementwise.c`: fp32 on a CPU, dense tensors whose rows are a multiple of WIDEST_VECTOR long."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from polyrhythm.kernels.compiling import COUNT, FLOAT, INT, POINTER, WIDEST_VECTOR, load_kernel
from polyrhythm.kernels.tensors import are_served

_ROWS_PER_PART = 32


def can_be_fused(weight: Tensor, row_length: int) -> bool:
    """Whether this machine has the kernel, and the kernel serves rows of this length with weights like this one."""
    return are_served(weight) and row_length % WIDEST_VECTOR == 0 and _load() is not None


def rms_norm(inputs: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm, and what each row was multiplied with, for the backward pass."""
    size = inputs.size(-1)
    num_rows = inputs.numel() // size
    outputs, inverse = torch.empty_like(inputs), inputs.new_empty(num_rows)
    _library().rms_norm(
        inputs.data_ptr(), weight.data_ptr(), epsilon, num_rows, size, outputs.data_ptr(), inverse.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return outputs, inverse


def rms_norm_backward(upstream: Tensor, inputs: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of inputs and weight."""
    num_rows, size = len(inverse), inputs.size(-1)
    gradient, parts = torch.empty_like(inputs), inputs.new_empty(-(-num_rows // _ROWS_PER_PART), size)
    _library().rms_norm_backward(
        upstream.data_ptr(), inputs.data_ptr(), weight.data_ptr(), inverse.data_ptr(), num_rows, size,
        gradient.data_ptr(), parts.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return gradient, parts.sum(0)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    outputs = torch.empty_like(gate)
    _library().swiglu(gate.data_ptr(), up.data_ptr(), gate.numel(), outputs.data_ptr(), torch.get_num_threads())
    return outputs


def swiglu_backward(upstream: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    _library().swiglu_backward(
        upstream.data_ptr(), gate.data_ptr(), up.data_ptr(), gate.numel(), of_gate.data_ptr(), of_up.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return of_gate, of_up


def softmax_statistics(logits: Tensor, largest: Tensor, total: Tensor, expected: Tensor) -> None:
    """Writes each row's largest logit, the sum of exponentials of the distances to it, and of those times the distances."""
    num_rows, size = logits.shape
    _library().softmax_statistics(
        logits.data_ptr(), num_rows, size, largest.data_ptr(), total.data_ptr(), expected.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip


def softmax_exponentials(logits: Tensor, largest: Tensor) -> None:
    """Logits become exponentials of their distances to the number of their row."""
    num_rows, size = logits.shape
    _library().softmax_exponentials(
        logits.data_ptr(), largest.data_ptr(), num_rows, size, torch.get_num_threads()
    )  # fmt: skip


def _load() -> ctypes.CDLL | None:
    return load_kernel("elementwise", _declare, ROWS_PER_PART=_ROWS_PER_PART)


@cache
def _library() -> ctypes.CDLL:
    library = _load()
    assert library is not None, "ask can_be_fused first"
    return library


def _declare(library: ctypes.CDLL) -> None:
    library.rms_norm.argtypes = [POINTER, POINTER, FLOAT, COUNT, COUNT, POINTER, POINTER, INT]
    library.rms_norm_backward.argtypes = [POINTER, POINTER, POINTER, POINTER, COUNT, COUNT, POINTER, POINTER, INT]
    library.swiglu.argtypes = [POINTER, POINTER, COUNT, POINTER, INT]
    library.swiglu_backward.argtypes = [POINTER, POINTER, POINTER, COUNT, POINTER, POINTER, INT]
    library.softmax_statistics.argtypes = [POINTER, COUNT, COUNT, POINTER, POINTER, POINTER, INT]
    library.softmax_exponentials.argtypes = [POINTER, POINTER, COUNT, COUNT, INT]
