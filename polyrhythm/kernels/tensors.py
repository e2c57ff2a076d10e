"""What kernels ask of tensors."""

import torch
from torch import Tensor


def are_served(*tensors: Tensor) -> bool:
    """Whether kernels can read them: they know fp32 on a CPU."""
    return all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)


def with_dense_heads(row: Tensor) -> Tensor:
    """Kernels take any strides but read a head's values as neighbours in memory, unchecked."""
    return row if row.stride(-1) == 1 else row.contiguous()


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
