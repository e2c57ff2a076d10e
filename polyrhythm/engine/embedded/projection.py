"""Matrix products with weights packed for the CPU, and the small operation that follows each of them in the same pass.

Three forms of one function. The kernel `product.c` reads each weight once from memory, in one stream, and fetches what comes
next meanwhile: at the row counts of decoding it takes three quarters of the time of oneDNN's kernels. Those come second, for
machines without a compiler; plain torch is for every other device. All round a row alike for any number of rows from 16 on
and any number of threads.
"""

import ctypes
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polyrhythm.kernels import load_kernel, pointer

Operation = Literal["plain", "silu", "times", "plus"]
_OPERATIONS: dict[Operation, int] = {"plain": 0, "silu": 1, "times": 2, "plus": 3}  # as in product.c
_ONEDNN_UNARY = {"plain": "none", "silu": "swish"}
_ONEDNN_BINARY = {"times": "mul", "plus": "add"}
# oneDNN chooses its layout for about this many rows; it serves any number.
_TYPICAL_ROWS = 32
_EXTRA_ROWS = 12  # the kernel takes rows by up to so many


class Projection:
    """x W^T + b for weights that change in place; `refresh` after they did."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.weight, self.bias = weight, bias
        self._product = product_for(weight, bias)

    def refresh(self) -> None:
        self._product.refresh()

    def __call__(self, inputs: Tensor) -> Tensor:
        return self._product(inputs, "plain", None)

    def silu(self, inputs: Tensor) -> Tensor:
        """silu of the product."""
        return self._product(inputs, "silu", None)

    def times(self, inputs: Tensor, factor: Tensor) -> Tensor:
        """The product times a tensor of its shape."""
        return self._product(inputs, "times", factor)

    def plus(self, inputs: Tensor, summand: Tensor) -> Tensor:
        """The product plus a tensor of its shape."""
        return self._product(inputs, "plus", summand)


class CompiledProduct:
    def __init__(self, weight: Tensor, bias: Tensor | None, library: ctypes.CDLL):
        self._weight, self._bias, self._library = weight, bias, library
        self._num_outputs, self._num_inputs = weight.shape
        columns = library.columns_per_block()
        self._packed = weight.new_empty(-(-self._num_outputs // columns) * columns * self._num_inputs)
        assert self._packed.data_ptr() % 64 == 0, "torch aligns what it allocates on a CPU"
        self.refresh()

    def refresh(self) -> None:
        self._library.pack(
            pointer(self._weight), ctypes.c_int64(self._num_outputs), ctypes.c_int64(self._num_inputs),
            pointer(self._packed), torch.get_num_threads(),
        )  # fmt: skip

    def __call__(self, inputs: Tensor, operation: Operation, other: Tensor | None) -> Tensor:
        num_rows = len(inputs)
        out = inputs.new_empty(num_rows, self._num_outputs)
        panels = inputs.new_empty((num_rows + _EXTRA_ROWS) * self._num_inputs)
        self._library.product(
            pointer(inputs), ctypes.c_int64(num_rows), ctypes.c_int64(inputs.stride(0)), pointer(self._packed),
            pointer(self._bias), pointer(other), ctypes.c_int64(self._num_inputs), ctypes.c_int64(self._num_outputs),
            _OPERATIONS[operation], pointer(panels), pointer(out), torch.get_num_threads(),
        )  # fmt: skip
        return out


class OneDnnProduct:
    def __init__(self, weight: Tensor, bias: Tensor | None):
        self._weight, self._bias = weight, bias
        self.refresh()

    def refresh(self) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, _TYPICAL_ROWS)

    def __call__(self, inputs: Tensor, operation: Operation, other: Tensor | None) -> Tensor:
        operators = torch.ops.mkldnn._linear_pointwise
        if other is None:
            return operators.default(inputs, self._packed, self._bias, _ONEDNN_UNARY[operation], [], "")
        return operators.binary(inputs, other, self._packed, self._bias, _ONEDNN_BINARY[operation])


class PlainProduct:
    def __init__(self, weight: Tensor, bias: Tensor | None):
        self._weight, self._bias = weight, bias

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    def __call__(self, inputs: Tensor, operation: Operation, other: Tensor | None) -> Tensor:
        product = F.linear(inputs, self._weight, self._bias)
        if other is None:
            return F.silu(product) if operation == "silu" else product
        return product * other if operation == "times" else product + other


def product_for(weight: Tensor, bias: Tensor | None) -> CompiledProduct | OneDnnProduct | PlainProduct:
    """The fastest form that this machine has."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return PlainProduct(weight, bias)
    if library := load_kernel("product"):
        return CompiledProduct(weight, bias, library)
    return OneDnnProduct(weight, bias) if torch.backends.mkldnn.is_available() else PlainProduct(weight, bias)
