"""`polyrhythm export`: a step of a run as a model folder."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.errors import UserError

if TYPE_CHECKING:
    from polyrhythm.runs.kept_step import KeptStep

FORMATS = ("auto", "float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_name", metavar="RUN[@STEP]", help="a run folder; without a step its last checkpoint")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="where to; default: RUN/export/step-STEP")
    parser.add_argument(
        "--dtype",
        choices=FORMATS,
        help="number format; default: as the run says, auto is that of the model it began with",
    )
    parser.add_argument("--force", action="store_true", help="replace a model that is there already")
    parser.add_argument("--list", action="store_true", help="show which steps there are, and export nothing")


def run(parsed: argparse.Namespace) -> int:
    from polyrhythm.runs.kept_step import find_kept_step

    if parsed.list:
        return _list(parsed.run_name)
    kept = find_kept_step(parsed.run_name)
    target = (parsed.to or kept.run.path / "export" / f"step-{kept.step}").expanduser().absolute()
    _check_target(target, parsed.force, kept.run.model_dir)
    print(_export(kept, target, parsed.dtype or kept.run.config().training.save_dtype))
    return 0


def _list(name: str) -> int:
    from polyrhythm.runs.kept_step import open_run
    from polyrhythm.weights.snapshot import read_manifest, snapshot_folder, whole_versions

    run = open_run(name)
    for step in whole_versions(run.checkpoints):
        size = read_manifest(run.checkpoints, step).num_bytes / 1e6
        print(f"step {step:<6} {size:10,.1f} MB  {snapshot_folder(run.checkpoints, step)}")
    if run.trained_model.exists():
        print(f"the trained model is in {run.trained_model}")
    return 0


def _check_target(target: Path, force: bool, needed: Path) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not force:
        raise UserError(f"--to {target} is there already: give another folder, or --force to replace it")
    if target.resolve() == needed.resolve():
        raise UserError(
            f"--to {target} is the model that the run began with, which --resume needs: give another folder"
        )
    # --to ~ --force; a run folder has a config.json too.
    if not (target / "config.json").is_file() or not any(target.glob("*.safetensors")):
        raise UserError(f"--to {target} holds something else than a model: it is not replaced, not even with --force")


def _export(kept: "KeptStep", target: Path, save_dtype: str) -> str:
    from transformers.utils import logging as transformers_logging

    from polyrhythm.training.export import export_checkpoint
    from polyrhythm.weights.snapshot import SnapshotError

    transformers_logging.disable_progress_bar()
    run = kept.run
    try:
        dtype = export_checkpoint(run.checkpoints, kept.step, run.model_dir, target, save_dtype)
    except SnapshotError as error:
        raise UserError(
            f"{kept} cannot be read: {error}; a live run may have removed it meanwhile: `polyrhythm export {run.path} --list`"
        ) from None
    why = (
        f", the number format of {run.config().model}; --dtype float32 keeps all digits" if save_dtype == "auto" else ""
    )
    return f"step {kept.step} of {run.path} is in {target}\nsaved in {dtype}{why if dtype != 'float32' else ''}"
