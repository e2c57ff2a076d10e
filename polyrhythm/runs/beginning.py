"""A new run that begins with what an earlier one has learnt: `train NEW.toml --from RUN@STEP`.

The weights of the step become a model folder inside the new run, with all their digits, so that the new run needs nothing
of the old one: it is the model of the run, and the reference of its KL term.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.config import Config, merged_config
from polyrhythm.errors import UserError
from polyrhythm.runs.kept_step import KeptStep, find_kept_step
from polyrhythm.weights.number_format import saved_format
from polyrhythm.weights.snapshot import read_manifest, snapshot_folder, writing_deadline_s

START_DEADLINE_S = 300.0
"""Python, torch and the model are loaded first."""


class Beginning(NamedTuple):
    """Where a new run takes its weights from, and whether the optimizer goes on too."""

    kept: KeptStep
    with_optimizer: bool = False

    @property
    def model_dir(self) -> Path:
        """Shape and tokenizer of the model are those of the earlier run."""
        return self.kept.run.model_dir


def find_beginning(name: str, config: Config, with_optimizer: bool = False) -> Beginning:
    """The beginning that `RUN` or `RUN@STEP` names, if a run with this configuration can have it."""
    beginning = Beginning(find_kept_step(name), with_optimizer)
    earlier, training = beginning.kept.run.config().training, config.training
    if with_optimizer:
        for key, before, now in (
            ("optimizer", earlier.optimizer, training.optimizer),
            ("weight_decay_exclude", earlier.weight_decay_exclude, training.weight_decay_exclude),
        ):
            if before != now:
                raise UserError(
                    f"--with-optimizer: training.{key}={now!r} cannot go on with the optimizer of {name}, where it was "
                    f"{before!r}: leave one of them out"
                )
    return beginning


def bring_into(folder: RunFolder, beginning: Beginning, config: Config) -> Config:
    """Put the weights, and the optimizer if it goes on, into the folder of a new run; its configuration says so."""
    kept = beginning.kept
    _export(kept, folder.initial_model)
    if beginning.with_optimizer:
        _copy_checkpoint(kept, folder.initial_optimizer)
    dtype = _number_format_of_new_run(config.training.save_dtype, kept.run)
    return merged_config(config.model_dump(), {"model": str(folder.initial_model), "training": {"save_dtype": dtype}})


def _number_format_of_new_run(save_dtype: str, earlier: RunFolder) -> str:
    """ "auto" is the number format that was given to the first run: the folders in between have all digits."""
    has_begun_with_another = earlier.model_dir == earlier.initial_model
    if save_dtype == "auto" and has_begun_with_another:
        save_dtype = earlier.config().training.save_dtype
    return saved_format(save_dtype, earlier.model_dir)


def _export(kept: KeptStep, target: Path) -> None:
    """In another process, so that this one, which only watches the run, never imports torch."""
    command = [sys.executable, "-m", "polyrhythm", "export", str(kept), "--to", str(target), "--dtype", "float32"]
    deadline_s = START_DEADLINE_S + writing_deadline_s(read_manifest(kept.run.checkpoints, kept.step).num_bytes)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        raise UserError(f"--from {kept}: its weights were not read and written within {deadline_s:.0f} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"--from {kept}: {lines[-1].removeprefix('polyrhythm: ')}")


def _copy_checkpoint(kept: KeptStep, target: Path) -> None:
    try:
        shutil.copytree(snapshot_folder(kept.run.checkpoints, kept.step), snapshot_folder(target, kept.step))
    except (OSError, shutil.Error) as error:
        raise UserError(f"--from {kept}: its optimizer cannot be copied to {target}: {error}") from None
