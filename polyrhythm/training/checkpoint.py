"""Checkpoints: policy and optimizer of a version, written whole and verified like any snapshot.

The reference model is not in them: it is the model that the run started from.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from polyrhythm.errors import AnotherFailed, RunError
from polyrhythm.observe.activity import Activity
from polyrhythm.training.checkpoint_writer import CheckpointWriter
from polyrhythm.training.trainer import Trainer
from polyrhythm.weights.export import Rows, named_weights
from polyrhythm.weights.snapshot import newest_whole_version, read_manifest
from polyrhythm.weights.store import SnapshotError, WeightStore

POLICY, OPTIMIZER, NUM_UPDATES = "policy.", "optimizer.", "num_updates"
"""How the tensors of a checkpoint are called: two beginnings, and one name."""


class Checkpoints:
    """The checkpoints of one run. `save` after a step is committed; `load` before training goes on."""

    def __init__(self, root: Path, trainer: Trainer):
        config = trainer.config.training
        self.store = WeightStore(root, keep=config.keep_checkpoints, file_mb=trainer.config.weights.file_mb)
        self._writer = CheckpointWriter(self.store, trainer.replica.writers_aside)
        self.trainer = trainer
        self._replica = trainer.replica
        self.every = config.checkpoint_every
        self._finished, self._num_updates = 0, 0

    def save_if_due(self, version: int) -> None:
        """The policy is now `version`, and the step that made it is committed. Training waits for a copy in memory only."""
        self._remember(version)
        self._writer.check()
        if self._replica.writes_rows and self.every and version % self.every == 0:
            with self.trainer.recorder.doing(Activity.CHECKPOINT):
                self._writer.begin(self._rows(), version)

    def save_last(self, version: int) -> None:
        """At the end of a run, which can then be given more steps."""
        self._writer.finish()  # what was begun when this process was the writer
        if self._replica.writes_rows and self.every and version % self.every:
            with self.trainer.recorder.doing(Activity.SAVE):
                self.save(version)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """When the training inside is interrupted, or another process fails, one process saves what is finished."""
        try:
            yield
        except (KeyboardInterrupt, AnotherFailed):
            if self._replica.keeps_the_last_step:
                self._save_finished()
            else:
                with suppress(RunError):  # perhaps the others still write what was begun
                    self._writer.finish()
            raise
        except Exception:
            with suppress(RunError):  # what has failed before is the cause
                self._writer.finish()
            raise

    def _save_finished(self) -> None:
        """Write the last finished step before the process ends, if the policy still is what that step made.

        After the first of several updates it is not: then the checkpoints that are there must do.
        """
        self._writer.finish()
        is_intact = self.trainer.optimizer.num_updates == self._num_updates
        if self.every and is_intact and self._finished > newest_whole_version(self.store.root):
            self.save(self._finished)

    def save(self, version: int) -> None:
        """When this returns in the writer the checkpoint is there."""
        self._writer.write(self._rows(), version)

    def begin(self, first_step: int, initial_optimizer: Path) -> None:
        """Go on from the checkpoint of a step. A run that begins goes on with the optimizer of an earlier run, if it has one.

        Its updates are counted from zero: the schedule of the learning rate is that of the new run.
        """
        if first_step > 0:
            self.load(first_step)
        elif version := newest_whole_version(initial_optimizer):
            store = WeightStore(initial_optimizer)
            state = self._space_for_state(store, version)
            store.load_rows_into(self._held(state), version, is_part=True)
            self._restore(state)

    def load(self, version: int) -> None:
        num_updates = torch.tensor(0, dtype=torch.int64)
        try:
            state = self._space_for_state(self.store, version)
            self.store.load_rows_into(self._held({**self._policy(), **state, NUM_UPDATES: num_updates}), version)
            self._restore(state)
            self.trainer.optimizer.round_masters()
        except SnapshotError as error:
            raise RunError(
                f"{error}: remove {self.store.folder(version)} to go on from an earlier checkpoint"
            ) from None
        self.trainer.optimizer.num_updates = int(num_updates)
        self._remember(version)

    def _space_for_state(self, store: WeightStore, version: int) -> dict[str, torch.Tensor]:
        """Of an optimizer that has made no update yet nobody knows what it will remember: the checkpoint does."""
        entries = read_manifest(store.root, version).tensors
        space = self.trainer.optimizer.space_for
        return {
            name: space(name.removeprefix(OPTIMIZER), entry)
            for name, entry in entries.items()
            if name.startswith(OPTIMIZER)
        }

    def _restore(self, state: dict[str, torch.Tensor]) -> None:
        self.trainer.optimizer.restore({name.removeprefix(OPTIMIZER): tensor for name, tensor in state.items()})

    def _remember(self, version: int) -> None:
        self._finished, self._num_updates = version, self.trainer.optimizer.num_updates

    def _policy(self) -> dict[str, torch.Tensor]:
        models = self.trainer.models
        return {f"{POLICY}{name}": tensor for name, tensor in named_weights(models.policy, models.masters).items()}

    def _rows(self) -> list[Rows]:
        """What this process holds of all that a checkpoint has."""
        optimizer = self.trainer.optimizer
        return self._held(
            {
                **self._policy(),
                **{f"{OPTIMIZER}{name}": tensor for name, tensor in optimizer.state().items()},
                NUM_UPDATES: torch.tensor(optimizer.num_updates, dtype=torch.int64),
            }
        )

    def _held(self, tensors: Mapping[str, torch.Tensor]) -> list[Rows]:
        return [self._replica.rows_of(name, tensor) for name, tensor in tensors.items()]
