"""A step of which a run has kept a checkpoint, by the name that users give it: `RUN` for the last one, or `RUN@STEP`."""

from pathlib import Path
from typing import NamedTuple

from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.errors import UserError
from polyrhythm.weights.snapshot import whole_versions


class KeptStep(NamedTuple):
    """Policy and optimizer of a run after a step."""

    run: RunFolder
    step: int

    def __str__(self) -> str:
        return f"{self.run.path}@{self.step}"


def open_run(name: str) -> RunFolder:
    """The run in a folder, live or ended; one that is none is a UserError."""
    path = Path(name).expanduser()
    for needed in ("config.json", "run.json"):
        if not (path / needed).is_file():
            raise UserError(f"{name} is not a run folder: it has no {needed}")
    return RunFolder(path.resolve())


def find_kept_step(name: str) -> KeptStep:
    """The checkpoint that `RUN` or `RUN@STEP` names; a UserError says which there are."""
    folder, step = (name, "") if Path(name).is_dir() else _divided(name)
    run = open_run(folder)
    steps = whole_versions(run.checkpoints)
    if not steps:
        trained = f"; its trained model is in {run.trained_model}" if run.trained_model.exists() else ""
        raise UserError(f"{folder} has no checkpoint{trained}: training.checkpoint_every says when one is written")
    if step and int(step) not in steps:
        raise UserError(
            f"{folder} has no checkpoint of step {step}, only of {', '.join(map(str, steps))}: training.checkpoint_every "
            "and training.keep_checkpoints say which are kept"
        )
    return KeptStep(run, int(step) if step else steps[-1])


def _divided(name: str) -> tuple[str, str]:
    folder, at, step = name.rpartition("@")
    if not at:
        return name, ""
    if not step.isdecimal():
        raise UserError(f"{name}: behind the @ stands the number of a step, such as {folder}@20")
    return folder, step
