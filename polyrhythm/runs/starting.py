"""From a configuration to the folder of a run: everything is checked before the folder is made."""

from pathlib import Path

from polyrhythm.cluster.preflight import check_run
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.config import Config, merged_config
from polyrhythm.errors import UserError
from polyrhythm.runs.data import Rows, Saved, keep_rows
from polyrhythm.weights.pretrained import resolve_model
from polyrhythm.weights.snapshot import newest_whole_version


def new_run(config: Config, rows: Rows | Saved | None = None) -> RunFolder:
    """The folder of a run with this configuration. `rows` are its problems, if a script gave them: they are kept in it."""
    say_that_it_is_checked(config)
    model_dir = resolve_model(config.model)
    if rows is None:
        check_run(config, model_dir)
        return RunFolder.create(config, model_dir)
    folder = RunFolder.reserve(config.output_dir)
    try:
        path = keep_rows(rows, folder.path)
        config = merged_config(config.model_dump(), {"task": {"options": {"path": str(path)}}})
        check_run(config, model_dir)
    except BaseException:
        folder.remove()
        raise
    folder.fill(config, model_dir)
    return folder


def reopened_run(run_dir: Path, config: Config) -> RunFolder:
    """The folder of an ended run, ready to go on from its last checkpoint."""
    say_that_it_is_checked(config)
    run = RunFolder(run_dir.resolve())
    first_step = newest_whole_version(run.checkpoints)
    # A run that ended while it saved its model has only that left to do.
    if first_step > config.num_steps or (first_step == config.num_steps and run.trained_model.exists()):
        raise UserError(f"{run_dir} has finished its num_steps={config.num_steps}: give a larger num_steps to go on")
    check_run(config, run.model_dir)
    run.reopen(config, first_step)
    print(f"going on with {run_dir} {_where(first_step, config.num_steps)}", flush=True)
    return run


def say_that_it_is_checked(config: Config) -> None:
    """The checks import the task and the rewards, and may fetch the model: that can take a while."""
    if config.observe.view != "none":
        print("checking the model, the task and the rewards", flush=True)


def _where(first_step: int, num_steps: int) -> str:
    if first_step == num_steps:
        return "after its last step, to save the model"
    over = ": there is no checkpoint, so it starts over" if first_step == 0 else ""
    return f"at step {first_step + 1} of {num_steps}{over}"
