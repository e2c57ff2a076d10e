"""Checkpoints: policy and optimizer of a version, written whole and verified like any snapshot.

The reference model is not in them: it is the model that the run started from.
"""

from pathlib import Path

import torch

from polyrhythm.training.trainer import Trainer
from polyrhythm.weights.store import SnapshotError, WeightStore, weights_of

FOLDER = "checkpoints"
NUM_KEPT = 2


class Checkpoints:
    """The checkpoints of one run. `save` after a step is committed; `load` before training goes on."""

    def __init__(self, run_dir: Path, trainer: Trainer, every: int = 1):
        self.store = WeightStore(run_dir / FOLDER, keep=NUM_KEPT)
        self.trainer = trainer
        self.every = every

    def save_if_due(self, version: int) -> None:
        if self.every and version % self.every == 0:
            with self.trainer.lane.doing("checkpoint"):
                self.save(version)

    def save(self, version: int) -> None:
        self.store.publish_tensors(self._tensors(), version)

    def load(self, version: int) -> None:
        self.store.load_into_tensors(tensors := self._tensors(), version)
        self.trainer.optimizer.num_updates = int(tensors["num_updates"])

    def _tensors(self) -> dict[str, torch.Tensor]:
        optimizer = self.trainer.optimizer
        return {
            **{f"policy.{name}": tensor for name, tensor in weights_of(self.trainer.policy).items()},
            **{f"adamw.{name}": tensor for name, tensor in optimizer.moments().items()},
            "num_updates": torch.tensor(optimizer.num_updates, dtype=torch.int64),
        }


def newest_checkpoint(run_dir: Path) -> int:
    """The version to go on from: that of the newest checkpoint with an intact manifest, or 0, the start."""
    store = WeightStore(run_dir / FOLDER)
    for version in reversed(store.versions()):
        try:
            store.read_manifest(version)
            return version
        except SnapshotError:
            continue
    return 0
