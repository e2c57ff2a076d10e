"""The ranks of the trainer meet: processes of this machine that become one process group."""

import os
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist

from polyrhythm.devices import choose_device
from polyrhythm.errors import RunError
from polyrhythm.training.parallel.channel import DEADLINE
from polyrhythm.training.parallel.replicate import WholeReplica


def join_ranks(rank: int, num: int, meeting_file: Path, deadline: timedelta = DEADLINE) -> WholeReplica:
    """Wait for the other ranks of this machine. They find each other through a file that only their user can read.

    Each sees its own device alone (devices/plan.py); that has not been run on any accelerator.
    """
    if num == 1:
        return WholeReplica()
    device = choose_device()
    for library in ("GLOO", "NCCL", "HCCL"):  # each would listen on the first address of the machine
        os.environ[f"{library}_SOCKET_IFNAME"] = _loopback_interface()
    try:
        store = dist.FileStore(str(meeting_file), num)  # pyright: ignore
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num, timeout=deadline)
    except (RuntimeError, ValueError) as error:
        raise RunError(f"rank {rank} of {num} did not meet the others within {deadline}: {error}") from None
    return WholeReplica(rank, num, device)


def leave_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _loopback_interface() -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    raise RunError("this machine has no loopback interface: ranks of the trainer cannot meet; use training.num_ranks=1")
