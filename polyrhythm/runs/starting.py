"""From a configuration to the folder of a run: everything is checked before the folder is made."""

from pathlib import Path

from polyrhythm.cluster.preflight import check_run
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.config import Config, merged_config
from polyrhythm.devices.plan import plan_devices
from polyrhythm.errors import UserError
from polyrhythm.runs.beginning import Beginning, bring_into
from polyrhythm.runs.data import Rows, Saved, keep_rows
from polyrhythm.weights.pretrained import resolve_model
from polyrhythm.weights.snapshot import newest_whole_version

OPEN_ENDED = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that do not ask how long a run is."""


def new_run(config: Config, rows: Rows | Saved | None = None, beginning: Beginning | None = None) -> RunFolder:
    """The folder of a run with this configuration; it holds all that the run needs and that may go away elsewhere.

    `rows` are its problems, if a script gave them. `beginning` is what an earlier run has learnt.
    """
    say_that_it_is_checked(config)
    model_dir = beginning.model_dir if beginning else resolve_model(config.model)
    if rows is None:
        check_run(config, model_dir)
    folder = RunFolder.reserve(config.output_dir)
    try:
        if rows is not None:
            path = keep_rows(rows, folder.path)
            config = merged_config(config.model_dump(), {"task": {"options": {"path": str(path)}}})
            check_run(config, model_dir)
        if beginning is not None:
            config, model_dir = bring_into(folder, beginning, config), folder.initial_model
            print(f"beginning with the weights of {beginning.kept}", flush=True)
    except BaseException:
        folder.remove()
        raise
    folder.fill(plan_devices(config).decided(config), model_dir)
    return folder


def reopened_run(run_dir: Path, config: Config) -> RunFolder:
    """The folder of an ended run, ready to go on from its last checkpoint."""
    say_that_it_is_checked(config)
    run = RunFolder(run_dir.resolve())
    first_step = newest_whole_version(run.checkpoints)
    # A run that ended while it saved its model has only that left to do.
    if first_step > config.num_steps or (first_step == config.num_steps and run.trained_model.exists()):
        raise UserError(f"{run_dir} has finished its num_steps={config.num_steps}: give a larger num_steps to go on")
    if config.dtype == "auto":  # begun by a version before 0.4.0, for which that was float32 everywhere
        config = config.model_copy(update={"dtype": "float32"})
    check_run(config, run.model_dir)
    _warn_of_another_plan(run.config(), config)
    run.reopen(config, first_step)
    print(f"going on with {run_dir} {_where(first_step, config.num_steps)}", flush=True)
    return run


def _warn_of_another_plan(before: Config, config: Config) -> None:
    """A schedule that ends with the run changes when the run gets longer."""
    schedule = config.training.schedule
    if before.num_steps != config.num_steps and schedule not in OPEN_ENDED:
        print(
            f"training.schedule={schedule!r} is planned over num_steps: with {config.num_steps} instead of "
            f"{before.num_steps} the learning rate goes on along another curve",
            flush=True,
        )


def say_that_it_is_checked(config: Config) -> None:
    """The checks import the task and the rewards, and may fetch the model: that can take a while."""
    if config.observe.view != "none":
        print("checking the model, the task and the rewards", flush=True)


def _where(first_step: int, num_steps: int) -> str:
    if first_step == num_steps:
        return "after its last step, to save the model"
    over = ": there is no checkpoint, so it starts over" if first_step == 0 else ""
    return f"at step {first_step + 1} of {num_steps}{over}"
