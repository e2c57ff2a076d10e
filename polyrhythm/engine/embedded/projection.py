"""Matrix products with weights packed for the CPU, and the small operation that follows each of them in the same pass.

Three forms of one function. The compiled kernel reads each weight once from memory, in one stream, and fetches what comes
next meanwhile: at the row counts of decoding it takes three quarters of the time of oneDNN's kernels. Those come second, for
machines without a compiler; plain torch is for every other device. All round a row alike for any number of rows from 16 on
and any number of threads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from polyrhythm.kernels.products import Operation, ProductKernel, product_kernel

_ONEDNN_UNARY = {"plain": "none", "silu": "swish"}
_ONEDNN_BINARY = {"times": "mul", "plus": "add"}
# oneDNN chooses its layout for about this many rows; it serves any number.
_TYPICAL_ROWS = 32


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
    def __init__(self, weight: Tensor, bias: Tensor | None, kernel: ProductKernel):
        self._weight, self._bias, self._kernel = weight, bias, kernel
        self._packed = kernel.pack(weight)

    def refresh(self) -> None:
        self._kernel.pack(self._weight, self._packed)

    def __call__(self, inputs: Tensor, operation: Operation, other: Tensor | None) -> Tensor:
        return self._kernel.multiply(inputs, self._packed, len(self._weight), self._bias, operation, other)


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
    if kernel := product_kernel():
        return CompiledProduct(weight, bias, kernel)
    return OneDnnProduct(weight, bias) if torch.backends.mkldnn.is_available() else PlainProduct(weight, bias)
