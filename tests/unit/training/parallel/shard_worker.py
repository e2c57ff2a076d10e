"""One rank of a sharded trainer: `python -m tests.unit.training.parallel.shard_worker RANK NUM FOLDER`.

Every case trains three steps with uneven shares, by all ranks and by one, and the first rank notes how far apart they are:
starting torch costs more than all cases.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyrhythm.config import Config, load_config
from polyrhythm.loader import LoaderSettings, RolloutLoader
from polyrhythm.messages import GroupsReply
from polyrhythm.training.parallel.ranks import leave_ranks
from polyrhythm.training.parallel.replica import Replica
from polyrhythm.training.parallel.replicate import WholeReplica
from polyrhythm.training.parallel.shard import Shard
from polyrhythm.training.parallel.shard_state import ShardedState
from polyrhythm.training.parallel.sharding import sharded_modules
from polyrhythm.training.trainer import Trainer
from polyrhythm.types import Group
from tests.conftest import ScriptedSource, build_tiny_model, make_group

NUM_STEPS, NUM_GROUPS = 3, 13
SHARES = (0, 0, 0, 1, 0, 0, 2, 0, 0, 1, 0, 0, 0)
"""Which replica gets which group, modulo their number: the first most of them, the last of four none."""
MODES = {2: ("replicate", "shard_state", "shard"), 4: ("replicate", "shard_state", "shard", "hsdp")}
CASES = {
    "plain": {"training": {"tokens_per_micro_batch": 40}},  # groups of several rows, and rounds of one and of many
    "kl": {"algorithm": {"kl_coef": 0.1}},
    "k1": {"algorithm": {"kl_coef": 0.1, "kl_estimator": "k1"}},
    "checkpointing": {"training": {"gradient_checkpointing": True}, "algorithm": {"kl_coef": 0.1}},
    "untied": {"model": "qwen2"},
    "two updates": {"training": {"updates_per_step": 2, "learning_rate": 1e-4}, "algorithm": {"kl_coef": 0.1}},
}
PLANTED = "a layer that takes the mean"


class UnevenSource(ScriptedSource):
    """The share of one replica, there from the start."""

    def __init__(self, replica: Replica):
        super().__init__([])
        self.index, self.num = replica.index, replica.num

    def groups(self, version: int, offset: int, until: int, wait_s: float) -> GroupsReply:
        mine = [group for group in all_groups(version)[:until] if SHARES[group.position] % self.num == self.index]
        return GroupsReply(groups=mine[offset:], is_last=True)


def all_groups(version: int) -> list[Group]:
    groups = [make_group(position, step=version, version=version) for position in range(NUM_GROUPS - 1)]
    return [*groups, msgspec.structs.replace(groups[0], position=NUM_GROUPS - 1)]


def config_of(case: dict) -> Config:
    num_updates = case.get("training", {}).get("updates_per_step", 1)
    rollout = {"group_size": 4, "groups_per_step": NUM_GROUPS - NUM_GROUPS % num_updates, "max_tokens": 9}
    training = {"learning_rate": 1e-2, **case.get("training", {})}
    return load_config([], {"num_steps": NUM_STEPS, "rollout": rollout, "training": training,
                            "algorithm": case.get("algorithm", {})})  # fmt: skip


class Trained:
    """Three steps: the gradients that AdamW saw in each update, and the weights before and after."""

    def __init__(self, case: dict, replica: Replica, planted: bool = False):
        trainer = Trainer(config_of(case), build_tiny_model(case.get("model", "llama")), replica=replica)
        if planted:
            layer = list(sharded_modules(trainer.policy))[-1]
            layer.set_gradient_divide_factor(2.0)
        self.trainer = trainer
        self.names = list(trainer.optimizer.names.values())
        self.gradients: list[dict[str, Tensor]] = []
        self.before = self._weights()
        update = trainer.optimizer.inner.step

        def record_and_update():
            self.gradients.append(
                {n: whole(p.grad) for n, p in zip(self.names, trainer.optimizer.parameters, strict=True)}
            )
            update()

        trainer.optimizer.inner.step = record_and_update
        settings = LoaderSettings.of(trainer.config, share_prompt=trainer.models.shares_prompts)
        self.metrics = []
        for step in RolloutLoader(UnevenSource(replica), settings, shards=replica).steps():
            trainer.begin_step(step.version)
            for update_of_step in step.updates():
                for micro_batch in update_of_step:
                    trainer.forward_backward(micro_batch)
                trainer.optim_step()
            self.metrics.append(trainer.metrics())
        self.after = self._weights()

    def _weights(self) -> dict[str, Tensor]:
        return {n: whole(p) for n, p in zip(self.names, self.trainer.optimizer.parameters, strict=True)}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def errors(ours: dict[str, Tensor], alone: dict[str, Tensor]) -> dict[str, float]:
    """By tensor, relative to its norm; to a hundredth of the whole gradient's for those that have less than that."""
    total = float(torch.stack([tensor.norm() for tensor in alone.values()]).norm())
    return {n: float((ours[n] - t).norm()) / max(float(t.norm()), 1e-2 * total) for n, t in alone.items()}


def compared(ours: Trained, alone: Trained) -> dict:
    worst = errors(ours.gradients[0], alone.gradients[0])
    moved = {n: ours.after[n] - alone.after[n] for n in alone.after}
    trained = {n: alone.after[n] - alone.before[n] for n in alone.after}
    name = max(worst, key=worst.__getitem__)
    return {
        "worst": worst[name],
        "of": name,
        "num_tensors": len(worst),
        "drift": float(norm(moved) / norm(trained)),
        "metrics": ours.metrics[0],
        "metrics_alone": alone.metrics[0],
    }


def norm(tensors: dict[str, Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors.values()]).norm()


def replicas(rank: int, num: int) -> dict[str, Replica]:
    device = torch.device("cpu")
    made = {"replicate": WholeReplica(rank, num), "shard_state": ShardedState(rank, num, device),
            "shard": Shard(rank, num, device)}  # fmt: skip
    return made | ({"hsdp": Shard(rank, num, device, ranks_per_replica=2)} if num == 4 else {})


def main(rank: int, num: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "meeting"), num)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num, timeout=timedelta(seconds=120))
    made = replicas(rank, num)
    said = {}
    for case, flags in CASES.items():
        alone = Trained(flags, WholeReplica())
        for mode, replica in made.items():
            said[f"{mode}/{case}"] = compared(Trained(flags, replica), alone)
    offloaded = Shard(rank, num, torch.device("cpu"), offload=True)
    said["offloaded"] = compared(Trained(CASES["kl"], offloaded), Trained(CASES["kl"], WholeReplica()))
    said[PLANTED] = compared(
        Trained(CASES["plain"], made["shard"], planted=True), Trained(CASES["plain"], WholeReplica())
    )
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    leave_ranks()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
