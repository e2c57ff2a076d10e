"""Publication: the policy of a version in the weight store, written by those who hold it, each its own rows."""

import shutil
from pathlib import Path

from polyrhythm.observe.activity import Activity
from polyrhythm.training.parallel.writing import write_together
from polyrhythm.training.policy.saving import DTYPES, save_policy, save_rows
from polyrhythm.training.trainer import Trainer
from polyrhythm.weights.export import exported
from polyrhythm.weights.number_format import saved_format
from polyrhythm.weights.proof import probe_of
from polyrhythm.weights.store import WeightStore


class Publication:
    """What one process does for the versions of a run: it writes its rows, or checks them against what others wrote."""

    def __init__(self, store: WeightStore, trainer: Trainer):
        self.store = store
        self._trainer = trainer
        self._replica = trainer.replica

    def publish(self, version: int) -> None:
        """The policy as `version`. When this returns in the writer, the version is complete and visible."""
        if not self._replica.writes_rows:
            return
        with self._trainer.recorder.doing(Activity.PUBLISH):
            # What engines must compute once they have loaded it.
            probe = probe_of(self._trainer.policy, version, self._replica.rows_of, self._replica.end_pass)
            models = self._trainer.models
            rows = exported(models.policy, self._replica.rows_of, models.masters, models.dtype)
            write_together(self.store, rows, version, self._replica.writers, probe)

    def verify(self, version: int) -> None:
        """Raises unless a copy of the policy that others hold too is what they have published."""
        if not self._replica.writes_rows:
            with self._trainer.recorder.doing(Activity.VERIFY):
                models = self._trainer.models
                self.store.verify(exported(models.policy, self._replica.rows_of, dtype=models.dtype), version)

    def save_model(self, version: int, model_dir: Path, target: Path) -> None:
        """What was learnt, as a model folder with all digits that `training.save_dtype` leaves. All processes call this."""
        if not self._replica.writes_rows:
            return
        save_dtype = self._trainer.config.training.save_dtype
        with self._trainer.recorder.doing(Activity.SAVE):
            if self._replica.writers.num == 1:
                save_policy(self._trainer.models.full_policy(), model_dir, target, save_dtype)
                return
            rows = target.with_name(f".{target.name}.rows")  # of a policy that nobody holds whole
            saved = exported(
                self._trainer.policy, self._replica.rows_of, dtype=DTYPES[saved_format(save_dtype, model_dir)]
            )
            write_together(WeightStore(rows), saved, version, self._replica.writers)
            if self._replica.is_writer:
                save_rows(WeightStore(rows).folder(version), self._trainer.policy, model_dir, target, save_dtype)
                shutil.rmtree(rows, ignore_errors=True)
