"""A forward pass in fp32 with weights of fewer digits, widened one module at a time: no second copy of the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def computing_in_fp32(model: nn.Module) -> Iterator[None]:
    """Inside, modules compute in fp32 with the numbers that their weights have; nothing happens to a model in fp32."""
    narrow: dict[nn.Module, dict[str, nn.Parameter]] = {}

    def widen(module: nn.Module, *_: Any) -> None:
        own = {name: p for name, p in module._parameters.items() if p is not None and _is_narrow(p)}
        narrow[module] = own
        for name, parameter in own.items():
            setattr(module, name, nn.Parameter(parameter.detach().float(), requires_grad=False))

    def restore(module: nn.Module, *_: Any) -> None:
        for name, parameter in narrow.pop(module, {}).items():
            setattr(module, name, parameter)

    # All of them: sharded weights are narrow only while they are whole. FSDP's hooks are around ours.
    modules = [module for module in model.modules() if module._parameters]
    hooks = [module.register_forward_pre_hook(widen) for module in modules]
    hooks += [module.register_forward_hook(restore, prepend=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in list(narrow):  # of a pass that failed
            restore(module)


def _is_narrow(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and parameter.dtype.itemsize < torch.float32.itemsize
