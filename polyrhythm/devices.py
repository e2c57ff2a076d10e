"""Where tensors live: every process of a run asks here."""

import os

import torch

from polyrhythm.errors import UserError

DEVICE_VARIABLE = "POLYRHYTHM_DEVICE"
"""In a process's environment: which kind of device it was given (cpu, cuda, npu); nothing or auto: what it finds."""


def choose_device() -> torch.device:
    """The device that this process was given; else the accelerator of this machine if there is one, else the CPU.

    On Linux the ordinary build of torch is the one for CUDA. It names cuda as its accelerator on machines without a GPU
    too, so whether one answers has to be asked.
    """
    given = os.environ.get(DEVICE_VARIABLE, "auto")
    if given == "cpu":
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if given not in ("auto", found.type):
        raise UserError(f"{DEVICE_VARIABLE}={given}, but this torch ({torch.__version__}) finds {found.type}")
    return found
