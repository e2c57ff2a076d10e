"""The ranks of the trainer meet: processes, wherever they are, that become one process group."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from polyrhythm.config import TrainingConfig
from polyrhythm.devices import choose_device
from polyrhythm.errors import RunError
from polyrhythm.messages import Setup
from polyrhythm.training.parallel.channel import DEADLINE
from polyrhythm.training.parallel.meeting import ConductorLine, ConductorStore, bind_to_route, meet_others
from polyrhythm.training.parallel.presence import Presence
from polyrhythm.training.parallel.replica import Replica
from polyrhythm.training.parallel.replicate import WholeReplica

PRESENT: list[Presence] = []
"""Of this process, as there is one process group of it."""
ReplicaKind = Callable[[int, int, torch.device], Replica]
"""Makes this process a part of its replica: its rank, how many ranks there are, its device."""


def replica_kind(training: TrainingConfig) -> ReplicaKind:
    """By `training.parallel`."""
    if training.parallel == "shard_state":
        from polyrhythm.training.parallel.shard_state import ShardedState

        return partial(ShardedState, offload=training.offload_optimizer)
    if training.parallel == "shard":
        from polyrhythm.training.parallel.shard import Shard

        return partial(Shard, ranks_per_replica=training.ranks_per_replica, offload=training.offload_optimizer)
    return WholeReplica


def join_ranks(
    url: str,
    credential: str,
    name: str,
    deadline: timedelta = DEADLINE,
    kind: ReplicaKind = WholeReplica,
    setup: Setup | None = None,
) -> Replica:
    """Take the place of this name in the run whose conductor is at `url`, and wait for the other ranks.

    A run admits only who is made of the same as itself, so it wants the `setup`.

    Each sees its own device alone (devices/plan.py); that has not been run on any accelerator.
    """
    line = ConductorLine(url, credential)
    membership = meet_others(line, name, deadline, setup)
    PRESENT.append(Presence(line, name, membership.lease_s))
    rank, num = membership.members.index(name), len(membership.members)
    if num == 1:
        return WholeReplica()
    device = choose_device()
    bind_to_route(url)
    try:
        store = ConductorStore(line, membership.epoch, deadline)
        backend = _backends(device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num, timeout=deadline)
    except (RuntimeError, ValueError) as error:
        raise RunError(f"{name}, rank {rank} of {num}, could not connect to the others: {error}") from None
    return kind(rank, num, device)


def _backends(device: torch.device) -> str:
    """Of the device, and of the host: what is offloaded there is reduced there."""
    own = dist.get_default_backend_for_device(device)
    return own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"


def leave_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def stay_in_run() -> None:
    """From now on this rank gives signs of life. While it starts, libraries may keep all its threads from running for long."""
    for presence in PRESENT:
        presence.start()


def leave_run() -> None:
    """This rank has nothing more to do; the conductor need not wait for a sign of life."""
    while PRESENT:
        PRESENT.pop().leave()
