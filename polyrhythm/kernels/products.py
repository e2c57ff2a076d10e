"""Products of few rows with weights that are read once from memory, by `product.c`: fp32 on a CPU."""

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polyrhythm.kernels.compiling import COUNT, INT, POINTER, load_kernel
from polyrhythm.kernels.tensors import address

Operation = Literal["plain", "silu", "times", "plus"]
"""What is done with a product in the same pass: nothing, silu of it, or another tensor of its shape multiplied or added."""
_OPERATIONS: dict[Operation, int] = {"plain": 0, "silu": 1, "times": 2, "plus": 3}
_ALIGNMENT = 64


@dataclass(frozen=True)
class ProductKernel:
    _library: ctypes.CDLL

    def pack(self, weight: Tensor, packed: Tensor | None = None) -> Tensor:
        """Weights [outputs, inputs] in the order in which `multiply` reads them, into the same memory as before if given."""
        num_outputs, num_inputs = weight.shape
        if packed is None:
            columns = self._library.columns_per_block()
            packed = weight.new_empty(-(-num_outputs // columns) * columns * num_inputs)
            assert packed.data_ptr() % _ALIGNMENT == 0, "torch aligns what it allocates on a CPU"
        self._library.pack(weight.data_ptr(), num_outputs, num_inputs, packed.data_ptr(), torch.get_num_threads())
        return packed

    def multiply(
        self, inputs: Tensor, packed: Tensor, num_outputs: int, bias: Tensor | None, operation: Operation,
        other: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """[rows, inputs] to [rows, outputs]; rows may lie any distance apart."""
        num_rows, num_inputs = inputs.shape
        out = inputs.new_empty(num_rows, num_outputs)
        panels = inputs.new_empty((num_rows + self._library.most_rows_at_once()) * num_inputs)
        self._library.product(
            inputs.data_ptr(), num_rows, inputs.stride(0), packed.data_ptr(), address(bias), address(other), num_inputs,
            num_outputs, _OPERATIONS[operation], panels.data_ptr(), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out


def product_kernel() -> ProductKernel | None:
    """The kernel, where this machine has it."""
    numbers = {name.upper(): number for name, number in _OPERATIONS.items()}
    library = load_kernel("product", _declare, **numbers)
    return ProductKernel(library) if library else None


def _declare(library: ctypes.CDLL) -> None:
    library.pack.argtypes = [POINTER, COUNT, COUNT, POINTER, INT]
    library.product.argtypes = [
        POINTER, COUNT, COUNT, POINTER, POINTER, POINTER, COUNT, COUNT, INT, POINTER, POINTER, INT,
    ]  # fmt: skip
