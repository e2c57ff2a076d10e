"""Checkpoints: policy and optimizer of a version, written whole and verified like any snapshot.

The reference model is not in them: it is the model that the run started from.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from polyrhythm.errors import AnotherFailed, RunError
from polyrhythm.observe.activity import Activity
from polyrhythm.training.trainer import Trainer
from polyrhythm.weights.export import named_weights, whole
from polyrhythm.weights.snapshot import newest_whole_version
from polyrhythm.weights.store import SnapshotError, WeightStore

NUM_KEPT = 2


class Checkpoints:
    """The checkpoints of one run. `save` after a step is committed; `load` before training goes on."""

    def __init__(self, root: Path, trainer: Trainer, every: int = 1):
        self.store = WeightStore(root, keep=NUM_KEPT)
        self.trainer = trainer
        self.every = every
        self._finished, self._num_updates = 0, 0

    def save_if_due(self, version: int) -> None:
        """The policy is now `version`, and the step that made it is committed."""
        self._remember(version)
        if self.every and version % self.every == 0:
            with self.trainer.recorder.doing(Activity.CHECKPOINT):
                self.save(version)

    def save_last(self, version: int) -> None:
        """At the end of a run, which can then be given more steps."""
        if self.every and version % self.every:
            self.save(version)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """When the training inside is interrupted, or another process fails, the writer saves what is finished."""
        try:
            yield
        except (KeyboardInterrupt, AnotherFailed):
            if self.trainer.replica.is_writer:
                self._save_finished()
            raise

    def _save_finished(self) -> None:
        """Write the last finished step before the process ends, if the policy still is what that step made.

        After the first of several updates it is not: then the checkpoints that are there must do.
        """
        is_intact = self.trainer.optimizer.num_updates == self._num_updates
        if self.every and is_intact and self._finished > newest_whole_version(self.store.root):
            self.save(self._finished)

    def save(self, version: int) -> None:
        self.store.publish((whole(name, tensor) for name, tensor in self._tensors().items()), version)

    def load(self, version: int) -> None:
        try:
            self.store.load_into(tensors := self._tensors(), version)
        except SnapshotError as error:
            raise RunError(
                f"{error}: remove {self.store.folder(version)} to go on from an earlier checkpoint"
            ) from None
        self.trainer.optimizer.num_updates = int(tensors["num_updates"])
        self._remember(version)

    def _remember(self, version: int) -> None:
        self._finished, self._num_updates = version, self.trainer.optimizer.num_updates

    def _tensors(self) -> dict[str, torch.Tensor]:
        optimizer = self.trainer.optimizer
        return {
            **{f"policy.{name}": tensor for name, tensor in named_weights(self.trainer.policy).items()},
            **{f"adamw.{name}": tensor for name, tensor in optimizer.moments().items()},
            "num_updates": torch.tensor(optimizer.num_updates, dtype=torch.int64),
        }
