"""How an elastic rank comes into a run that may have gone on without it: with weights from the store, the rest from the others."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from polyrhythm.messages import publish_duty
from polyrhythm.training.checkpoint import Checkpoints
from polyrhythm.training.parallel.elastic.replica import ElasticReplica
from polyrhythm.training.trainer import Trainer
from polyrhythm.weights.export import named_weights
from polyrhythm.weights.proof import prove_model
from polyrhythm.weights.store import WeightStore

OPTIMIZER, MASTER, NUM_UPDATES = "optimizer.", "master.", "num_updates"


def enter_run(
    replica: ElasticReplica,
    trainer: Trainer,
    checkpoints: Checkpoints,
    store: WeightStore,
    first_step: int,
    initial_optimizer: Path,
    publish: Callable[[int], None],
) -> int:
    """Until this rank takes part in updates; the version that it begins with. If it is to open the run, it does by `publish`."""
    replica.keep_state = lambda: _state_of(trainer)
    replica.restore_state = lambda state: _restore(trainer, state)
    holds, has_state = -1, False
    while (entry := replica.place.enter(holds, has_state)).what != "train":
        # What the run began with is in its folder, which a rank of another machine may not have.
        is_kept = first_step == 0 or first_step in checkpoints.store.versions()
        holds, has_state = entry.version, entry.version == first_step and is_kept
        if has_state:
            checkpoints.begin(first_step, initial_optimizer)
        else:
            _load(trainer, store, entry.version)
        if entry.what == "found":
            replica.appoint(publish_duty(first_step))
            publish(first_step)
    return entry.version


def _load(trainer: Trainer, store: WeightStore, version: int) -> None:
    """The weights of a version, verified, and proved to be what this rank computes with."""
    manifest = store.load_into(named_weights(trainer.policy), version)
    prove_model(trainer.policy, manifest)


def _state_of(trainer: Trainer) -> dict[str, Tensor]:
    """All that an update needs besides the weights that are published."""
    optimizer = trainer.optimizer
    return {
        **{f"{OPTIMIZER}{name}": tensor for name, tensor in optimizer.state().items()},
        **{f"{MASTER}{name}": master.detach() for name, master in _masters(trainer).items()},
        NUM_UPDATES: torch.tensor([optimizer.num_updates], dtype=torch.int64),
    }


@torch.no_grad()
def _restore(trainer: Trainer, state: Mapping[str, Tensor]) -> None:
    kept = {name.removeprefix(OPTIMIZER): tensor for name, tensor in state.items() if name.startswith(OPTIMIZER)}
    trainer.optimizer.restore(kept)
    for name, master in _masters(trainer).items():
        master.copy_(state[f"{MASTER}{name}"])
    trainer.optimizer.num_updates = int(state[NUM_UPDATES])


def _masters(trainer: Trainer) -> dict[str, Tensor]:
    masters = {id(master) for master in trainer.models.masters.values()}
    return {name: tensor for tensor, name in trainer.optimizer.names.items() if id(tensor) in masters}
