"""Publication: the policy of a version in the weight store, written by those who hold it, each its own rows."""

from pathlib import Path

from polyrhythm.observe.activity import Activity
from polyrhythm.training.parallel.writing import write_together
from polyrhythm.training.policy.saving import save_policy, save_snapshot
from polyrhythm.training.trainer import Trainer
from polyrhythm.weights.export import exported
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
            rows = exported(self._trainer.policy, self._replica.rows_of, self._trainer.models.masters)
            write_together(self.store, rows, version, self._replica.writers, probe)

    def verify(self, version: int) -> None:
        """Raises unless a copy of the policy that others hold too is what they have published."""
        if not self._replica.writes_rows:
            with self._trainer.recorder.doing(Activity.VERIFY):
                self.store.verify(exported(self._trainer.policy, self._replica.rows_of), version)

    def save_model(self, version: int, model_dir: Path, target: Path) -> None:
        """What was learnt, as a model folder. Of a policy that this process does not hold whole, the published version."""
        save_dtype = self._trainer.config.training.save_dtype
        if self._replica.writers.num == 1:
            save_policy(self._trainer.models.full_policy(), model_dir, target, save_dtype)
        else:
            save_snapshot(self.store, version, self._trainer.policy, model_dir, target, save_dtype)
