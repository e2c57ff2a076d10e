"""One rank of a sharded trainer: `python -m tests.unit.training.parallel.shard_worker RANK NUM FOLDER`.

Every case trains three steps with uneven shares, by all ranks and by one, and the first rank notes how far apart they are:
starting torch costs more than all cases.
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyrhythm.config import Config, load_config
from polyrhythm.loader import LoaderSettings, RolloutLoader
from polyrhythm.messages import GroupsReply
from polyrhythm.training.checkpoint import Checkpoints
from polyrhythm.training.parallel.ranks import leave_ranks
from polyrhythm.training.parallel.replica import Replica
from polyrhythm.training.parallel.replicate import WholeReplica
from polyrhythm.training.parallel.shard import Shard
from polyrhythm.training.parallel.shard_state import ShardedState
from polyrhythm.training.parallel.sharding import sharded_modules
from polyrhythm.training.publication import Publication
from polyrhythm.training.trainer import Trainer
from polyrhythm.types import Group
from polyrhythm.weights.export import named_weights
from polyrhythm.weights.pieces.layout import DTYPE_NAMES
from polyrhythm.weights.proof import check_proof, negate_for_canary, required_probe
from polyrhythm.weights.store import SnapshotError, WeightStore
from tests.conftest import ScriptedSource, build_tiny_model, make_group
from tests.publishing import own_logprobs
from tests.tiny_model import save_tiny_model

NUM_STEPS, NUM_GROUPS = 3, 13
SHARES = (0, 0, 0, 1, 0, 0, 2, 0, 0, 1, 0, 0, 0)
"""Which replica gets which group, modulo their number: the first most of them, the last of four none."""
MODES = {2: ("replicate", "shard_state", "shard"), 4: ("replicate", "shard_state", "shard", "hsdp")}
CASES = {
    "plain": {"training": {"tokens_per_micro_batch": 40}},  # groups of several rows, and rounds of one and of many
    "kl and checkpointing": {"algorithm": {"kl_coef": 0.1}, "training": {"gradient_checkpointing": True}},
    "two updates": {"training": {"updates_per_step": 2, "learning_rate": 1e-4}, "algorithm": {"kl_coef": 0.1}},
    "kl in the reward": {"algorithm": {"kl_coef": 0.1, "kl_estimator": "k1"}},
    "untied": {"model": "qwen2"},
    "bf16": {"dtype": "bfloat16", "training": {"tokens_per_micro_batch": 40}},
    "bf16, kl and checkpointing": {"dtype": "bfloat16", "algorithm": {"kl_coef": 0.1},
                                   "training": {"gradient_checkpointing": True}},
    "bf16, two updates": {"dtype": "bfloat16", "algorithm": {"kl_coef": 0.1},
                          "training": {"updates_per_step": 2, "learning_rate": 1e-4}},
}  # fmt: skip
OF_FOUR = ("plain", "kl and checkpointing", "two updates", "bf16")
"""Four processes are twice as slow on two cores."""
KINDS = {WholeReplica: "replicate", ShardedState: "shard_state", Shard: "shard"}
KEPT = ("plain", "bf16")
"""Cases whose checkpoints and publications are read by all."""
OFFLOADED = "offloaded"
PLANTED = "a layer that takes the mean"
ROUNDED = "gradients that are summed in bf16"


def let_a_layer_take_the_mean(trainer: Trainer) -> None:
    list(sharded_modules(trainer.policy))[-1].set_gradient_divide_factor(2.0)


def sum_in_bf16(trainer: Trainer) -> None:
    """In the layers; the head refuses it."""
    for module in list(sharded_modules(trainer.policy))[1:]:
        module.unshard()
        for weight in module.parameters():
            if not isinstance(weight, DTensor):
                weight.grad_dtype = torch.bfloat16
        module.reshard()


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


def config_of(case: dict, replica: Replica) -> Config:
    num_updates = case.get("training", {}).get("updates_per_step", 1)
    rollout = {"group_size": 4, "groups_per_step": NUM_GROUPS - NUM_GROUPS % num_updates, "max_tokens": 9}
    parallel = {"num_ranks": replica.num * replica.num_shards, "parallel": KINDS[type(replica)]}
    training = {"learning_rate": 1e-2, **parallel, **case.get("training", {})}
    return load_config([], {"num_steps": NUM_STEPS, "rollout": rollout, "training": training,
                            "dtype": case.get("dtype", "float32"), "algorithm": case.get("algorithm", {})})  # fmt: skip


class Trained:
    """Three steps: the gradients that AdamW saw in each update, and the weights before and after."""

    def __init__(self, case: dict, replica: Replica, planted: Callable[[Trainer], None] | None = None):
        trainer = Trainer(config_of(case, replica), build_tiny_model(case.get("model", "llama")), replica=replica)
        if planted:
            planted(trainer)
        self.case, self.trainer = case, trainer
        self.names = list(trainer.optimizer.names.values())
        self.gradients: list[dict[str, Tensor]] = []
        self.before = self._weights()
        update = trainer.optimizer.inner.step

        def record_and_update():
            self.gradients.append({name: whole(parameter.grad) for parameter, name in trainer.optimizer.names.items()})
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
        return {name: whole(parameter) for parameter, name in self.trainer.optimizer.names.items()}


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


def kept_by(ours: Trained, by: str, root: Path, made: dict[str, Replica]) -> dict[str, bool]:
    """A checkpoint and a publication of trained weights, read by whoever holds other rows of them."""
    trainer = ours.trainer
    checkpoints = Checkpoints(root / "checkpoints", trainer)
    checkpoints.begin(0, root / "none")
    checkpoints.save_if_due(20)
    checkpoints.save_last(20)
    publication = Publication(WeightStore(root / "weights"), trainer)
    publication.publish(NUM_STEPS)
    dist.barrier()
    publication.verify(NUM_STEPS)
    said = {f"{by} publishes": is_published(publication, ours)}
    if not trainer.replica.writes_rows:
        said[f"{by} finds a bit that differs"] = finds_a_bit(publication, trainer)
    publication.save_model(NUM_STEPS, save_tiny_model(root / f"like-{dist.get_rank()}"), root / "model")
    if trainer.replica.is_writer:
        said[f"{by} saves a model"] = is_saved(ours, root / "model")
    for mode, replica in made.items():
        other = Trainer(config_of(ours.case, replica), build_tiny_model("llama", seed=1), replica=replica)
        Checkpoints(root / "checkpoints", other).load(20)
        said[f"{by}, read by {mode}"] = state_of(other, whole) == state_of(trainer, whole)
        dist.barrier()
    return said


def state_of(trainer: Trainer, form) -> dict[str, object]:
    parameters = {name: parameter for parameter, name in trainer.optimizer.names.items()}
    assert {tensor.dtype for tensor in parameters.values()} == {torch.float32}, "the masters have all digits"
    tensors = {**parameters, **trainer.optimizer.state()}
    return {name: form(tensor).tolist() for name, tensor in tensors.items()} | {"n": trainer.optimizer.num_updates}


def is_published(publication: Publication, ours: Trained) -> bool:
    """Its weights are those of the ranks, bit for bit, and they compute what the probe says."""
    model = build_tiny_model("llama", seed=1)
    manifest = publication.store.load_into(named_weights(model), NUM_STEPS)
    check_proof(
        NUM_STEPS, required_probe(manifest), own_logprobs(model, manifest.probe.sequences), "float32", is_canary=False
    )
    negate_for_canary(named_weights(model), NUM_STEPS)
    check_proof(NUM_STEPS, manifest.probe, own_logprobs(model, manifest.probe.sequences), "float32", is_canary=True)
    negate_for_canary(named_weights(model), NUM_STEPS)
    dtype = ours.trainer.models.dtype
    assert {entry.dtype for entry in manifest.tensors.values()} == {DTYPE_NAMES[dtype]}
    return all(torch.equal(ours.after[name].to(dtype).float(), tensor) for name, tensor in model.named_parameters())


@torch.no_grad()
def finds_a_bit(publication: Publication, trainer: Trainer) -> bool:
    *_, tensor = named_weights(trainer.policy).items()
    number = trainer.replica.rows_of(*tensor).rows.view(-1)[:1]
    before = number.clone()
    number.copy_(before * (1 + 2**-7 if trainer.config.dtype == "bfloat16" else 1 + 2**-23))
    try:
        publication.verify(NUM_STEPS)
    except SnapshotError:
        return True
    finally:
        number.copy_(before)
    return False


def is_saved(ours: Trained, model: Path) -> bool:
    """With all digits."""
    tensors = load_file(model / "model.safetensors")
    return all(torch.equal(ours.after[name], tensor) for name, tensor in tensors.items()) and len(tensors) == len(
        ours.after
    )


def main(rank: int, num: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "meeting"), num)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num, timeout=timedelta(seconds=600))
    made = replicas(rank, num)
    said: dict = {"kept": {case: {} for case in KEPT}}
    for case in CASES if num == 2 else OF_FOUR:
        alone = Trained(CASES[case], WholeReplica())
        for mode, replica in made.items():
            ours = Trained(CASES[case], replica)
            said[f"{mode}/{case}"] = compared(ours, alone)
            if case in KEPT:
                said["kept"][case] |= kept_by(ours, mode, folder / case / mode, made)
        if case == "plain":
            said[PLANTED] = compared(Trained(CASES[case], made["shard"], let_a_layer_take_the_mean), alone)
        if case == "bf16":
            said[ROUNDED] = compared(Trained(CASES[case], made["shard"], sum_in_bf16), alone)
        if case in KEPT:
            offloaded = Trained(CASES[case], Shard(rank, num, torch.device("cpu"), offload=True))
            said[f"{OFFLOADED}/{case}"] = compared(offloaded, alone)
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    leave_ranks()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
