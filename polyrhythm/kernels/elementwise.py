"""RMS norm, SwiGLU and softmax by `elementwise.c`: fp32 on a CPU, dense tensors whose rows are a multiple of LANES long."""

import ctypes

import torch
from torch import Tensor

from polyrhythm.kernels import LANES, are_served, load_kernel, pointer

_ROWS_PER_PART = 32  # as in elementwise.c


def can_be_fused(weight: Tensor, row_length: int) -> bool:
    """Whether this machine has the kernel, and the kernel serves rows of this length with weights like this one."""
    return are_served(weight) and row_length % LANES == 0 and load_kernel("elementwise") is not None


def rms_norm(inputs: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm, and what each row was multiplied with, for the backward pass."""
    size = inputs.size(-1)
    num_rows = inputs.numel() // size
    outputs, inverse = torch.empty_like(inputs), inputs.new_empty(num_rows)
    _library().rms_norm(
        pointer(inputs), pointer(weight), ctypes.c_float(epsilon), ctypes.c_int64(num_rows), ctypes.c_int64(size),
        pointer(outputs), pointer(inverse), torch.get_num_threads(),
    )  # fmt: skip
    return outputs, inverse


def rms_norm_backward(upstream: Tensor, inputs: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of inputs and weight."""
    num_rows, size = len(inverse), inputs.size(-1)
    gradient, parts = torch.empty_like(inputs), inputs.new_empty(-(-num_rows // _ROWS_PER_PART), size)
    _library().rms_norm_backward(
        pointer(upstream), pointer(inputs), pointer(weight), pointer(inverse), ctypes.c_int64(num_rows),
        ctypes.c_int64(size), pointer(gradient), pointer(parts), torch.get_num_threads(),
    )  # fmt: skip
    return gradient, parts.sum(0)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    outputs = torch.empty_like(gate)
    count = ctypes.c_int64(gate.numel())
    _library().swiglu(pointer(gate), pointer(up), count, pointer(outputs), torch.get_num_threads())
    return outputs


def swiglu_backward(upstream: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    _library().swiglu_backward(
        pointer(upstream), pointer(gate), pointer(up), ctypes.c_int64(gate.numel()), pointer(of_gate), pointer(of_up),
        torch.get_num_threads(),
    )  # fmt: skip
    return of_gate, of_up


def softmax_statistics(logits: Tensor, largest: Tensor, total: Tensor, expected: Tensor) -> None:
    """Writes each row's largest logit, the sum of exponentials of the distances to it, and of those times the distances."""
    num_rows, size = logits.shape
    _library().softmax_statistics(
        pointer(logits), ctypes.c_int64(num_rows), ctypes.c_int64(size), pointer(largest), pointer(total),
        pointer(expected), torch.get_num_threads(),
    )  # fmt: skip


def softmax_exponentials(logits: Tensor, largest: Tensor) -> None:
    """Logits become exponentials of their distances to the number of their row."""
    num_rows, size = logits.shape
    _library().softmax_exponentials(
        pointer(logits), pointer(largest), ctypes.c_int64(num_rows), ctypes.c_int64(size), torch.get_num_threads()
    )


def _library() -> ctypes.CDLL:
    library = load_kernel("elementwise")
    assert library is not None, "ask can_be_fused first"
    return library
