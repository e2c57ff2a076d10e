"""`polyrhythm.train`: a run from a script or a notebook."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.config import Config, load_resumed_config, merged_config
from polyrhythm.errors import UserError
from polyrhythm.rewards.sandbox.hosting import host_functions
from polyrhythm.runs.arguments import ConfigKeys, Dataset, Reward, layer_of, request_of, rewards_of
from polyrhythm.runs.carrying_out import carry_out
from polyrhythm.runs.run import Run
from polyrhythm.runs.script import errors_without_our_frames, refuse_while_imported, script_modules_found
from polyrhythm.runs.starting import new_run, reopened_run


def train(
    *,
    model: str | Path | None = None,
    dataset: Dataset | None = None,
    rewards: Reward | Sequence[Reward] | None = None,
    reward_weights: Sequence[float] | None = None,
    config: Config | None = None,
    resume: str | Path | None = None,
    **keys: Unpack[ConfigKeys],
) -> Run:
    """Train a model on this machine, as `polyrhythm train` does, and return the run when it has finished.

    run = polyrhythm.train(model="smollm2-135m", dataset=rows, rewards=[correct], rollout={"group_size": 8})

    `dataset` is a list of dicts, a datasets.Dataset, a path, a hub id, or the class of a task; `rewards` are functions.
    All keys of a configuration are keyword arguments; those that are not given are as in `config`, or have their
    defaults. `resume` is the folder of a run that was interrupted. A mistake is a UserError, a part that fails a RunError.
    """
    refuse_while_imported("train")
    with errors_without_our_frames(), script_modules_found(), host_functions(rewards_of(rewards)) as names:
        if resume is not None:
            given = {"model": model, "dataset": dataset, "config": config, "reward_weights": reward_weights}
            folder = _resumed(Path(resume), given, names, keys)
        else:
            request = request_of(model, dataset, names, reward_weights, config, keys)
            folder = new_run(request.config, request.rows)
        carry_out(folder, folder.config(), how_to_resume(folder))
        return Run(folder.path)


def how_to_resume(folder: RunFolder) -> str:
    """What a script would say to go on; functions that only the script has must be given again."""
    parts = [name.rpartition(":") for name in folder.config().reward.functions]
    held = [name for host, _, name in parts if host.endswith(".sock")]
    rewards = f", rewards=[{', '.join(held)}]" if held else ""
    return f'polyrhythm.train(resume="{folder.path}"{rewards})'


def _resumed(run_dir: Path, given: Mapping[str, object], rewards: list[str], keys: Mapping[str, Any]) -> RunFolder:
    for name, value in given.items():
        if value is not None:
            raise UserError(f"resume={str(run_dir)!r} goes on with what is in the run folder: leave out {name}")
    config = load_resumed_config(run_dir, layer_of(keys))
    if rewards:
        config = _with_the_same_rewards(config, rewards)
    return reopened_run(run_dir, config)


def _with_the_same_rewards(config: Config, rewards: list[str]) -> Config:
    """Functions of a script are held by another process than before, and must be called as they were."""
    before, now = ([name.rpartition(":")[2] for name in names] for names in (config.reward.functions, rewards))
    if before != now:
        raise UserError(
            f"rewards={now} are not those of the run, {before}: a run goes on with the same, in their order"
        )
    return merged_config(config.model_dump(), {"reward": {"functions": rewards}})
