"""Where tensors live: which devices a machine has, which process of a run is given which, and whether all of it fits.

A process asks `choose_device`; nobody else asks torch. Nothing here imports torch before it is needed: the process that
starts a run has none.
"""

import os
from typing import TYPE_CHECKING

from polyrhythm.errors import UserError

if TYPE_CHECKING:
    import torch

DEVICE_VARIABLE = "POLYRHYTHM_DEVICE"
"""In a process's environment: which kind of device it was given (cpu, cuda, npu); nothing or auto: what it finds."""
ACCELERATORS = ("cuda", "npu")
"""Kinds for which there is an attention kernel. On any other the CPU is used."""


def choose_device() -> "torch.device":
    """The device that this process was given; else the accelerator of this machine if there is one, else the CPU."""
    import torch

    given = os.environ.get(DEVICE_VARIABLE, "auto")
    if given == "cpu":
        return torch.device("cpu")
    found = find_accelerator()
    if given not in ("auto", found):
        raise UserError(f"{DEVICE_VARIABLE}={given}, but torch {torch.__version__} finds {found or 'no accelerator'}")
    return torch.device(found or "cpu")


def find_accelerator() -> str | None:
    """The kind of accelerator that torch can use here.

    On Linux the ordinary build of torch is the one for CUDA. It names cuda as its accelerator on machines without a GPU
    too, so whether one answers has to be asked.
    """
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in ACCELERATORS else None


def free_memory(device: "torch.device") -> int:
    """Bytes that can still be had where tensors of this device live."""
    if device.type == "cpu":
        import psutil

        return psutil.virtual_memory().available
    import torch

    return torch.accelerator.get_memory_info(device)[0]
