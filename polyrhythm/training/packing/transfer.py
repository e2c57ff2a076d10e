"""Numbers from the host to an accelerator, together: each copy makes one of them wait for the other."""

from collections.abc import Sequence

import torch
from torch import Tensor


def moved_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same tensors, all of one number format, on the device by one copy; on a CPU they are what they were."""
    if device.type == "cpu":
        return list(tensors)
    there = torch.cat([tensor.flatten() for tensor in tensors]).to(device, non_blocking=True)
    parts = there.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
