"""Where tensors live: every process of a run asks here."""

import torch


def choose_device() -> torch.device:
    """The accelerator of this machine if there is one, else the CPU.

    On Linux the ordinary build of torch is the one for CUDA. It names cuda as its accelerator on machines without a GPU
    too, so whether one answers has to be asked.
    """
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
