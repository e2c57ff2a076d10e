"""One of two ranks on pretend devices: `python -m tests.devices.rank_scene RANK FOLDER` leaves FOLDER/RANK.json.

They are replicas that have shared the groups of a step; the first publishes what they have learnt, the second verifies it. The
first also makes the same update alone, to compare.
"""

from tests.devices import pretend_device  # isort: skip  # before anything else: it changes what torch is

import json
import os
import sys
import traceback
from pathlib import Path

import msgspec
import torch.distributed as dist

from polyrhythm.devices import DEVICE_VARIABLE
from polyrhythm.training.parallel.replicate import WholeReplica
from polyrhythm.training.publication import Publication
from polyrhythm.training.trainer import Trainer
from polyrhythm.weights.store import WeightStore
from tests.devices import pretend_torch_npu
from tests.devices.scenes import flat_weights, micro_batch, save_model, trainer_of

NUM_RANKS = 2


def main(rank: int, folder: Path) -> None:
    os.environ[DEVICE_VARIABLE] = pretend_device.NAME
    pretend_torch_npu.install()
    model = save_model(folder / f"model-{rank}", num_layers=2)
    meeting = dist.FileStore(str(folder / "meeting"), NUM_RANKS)  # pyright: ignore
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=NUM_RANKS)
    replica = WholeReplica(rank, NUM_RANKS, pretend_device.DEVICE)
    trainer = trainer_of(model, {}, replica)
    metrics = step_of(trainer, own=slice(rank, None, NUM_RANKS))
    publication = Publication(WeightStore(folder / "weights"), trainer)
    publication.publish(1)
    replica.gather(rank)  # it is there
    publication.verify(1)
    said = {"device": str(trainer.device), "weights": flat_weights(trainer), "metrics": metrics}
    if rank == 0:
        alone = trainer_of(model, {})
        said["metrics alone"] = step_of(alone, own=slice(None))
        said["weights alone"] = flat_weights(alone)
    (folder / f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def step_of(trainer: Trainer, own: slice) -> dict[str, float]:
    batch = micro_batch()
    trainer.begin_step(0)
    trainer.forward_backward(msgspec.structs.replace(batch, groups=batch.groups[own], advantages=batch.advantages[own]))
    trainer.optim_step()
    return trainer.metrics()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), Path(sys.argv[2]))
    except Exception:
        traceback.print_exc()
        os._exit(1)
