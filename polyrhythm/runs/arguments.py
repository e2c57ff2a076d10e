"""What a script gives, made into the configuration that a TOML file would have given."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from polyrhythm.config import (
    AlgorithmConfig,
    ClusterConfig,
    ConductorConfig,
    Config,
    EngineConfig,
    ObserveConfig,
    PromptConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
    TrainingConfig,
    WeightsConfig,
    explain_unknown,
    merged_config,
)
from polyrhythm.config.section import Section
from polyrhythm.errors import UserError
from polyrhythm.runs.data import WHAT_IT_CAN_BE, Rows, Saved, is_rows
from polyrhythm.runs.script import name_of_class

Dataset = Rows | Saved | str | Path | type
Reward = Callable[..., Any] | str
Keys = Mapping[str, Any]


class ConfigKeys(TypedDict, total=False):
    """The keys of a Config as keyword arguments; a section is an object of its class or a dict."""

    seed: int
    num_steps: int
    output_dir: str
    device: Literal["auto", "cpu", "cuda", "npu"]
    dtype: Literal["auto", "float32", "bfloat16"]
    schedule: Literal["periodic", "sync"]
    order: Literal["completion", "problem"]
    task: TaskConfig | Keys
    prompt: PromptConfig | Keys
    rollout: RolloutConfig | Keys
    reward: RewardConfig | Keys
    algorithm: AlgorithmConfig | Keys
    engine: EngineConfig | Keys
    training: TrainingConfig | Keys
    weights: WeightsConfig | Keys
    conductor: ConductorConfig | Keys
    cluster: ClusterConfig | Keys
    observe: ObserveConfig | Keys


CALLED_HERE = {
    "args": "config",
    "reward_funcs": "rewards",
    "reward_functions": "rewards",
    "reward_fn": "rewards",
    "train_dataset": "dataset",
    "data": "dataset",
    "model_name": "model",
    "model_name_or_path": "model",
    "resume_from_checkpoint": "resume",
}
"""Arguments that TRL's trainers and others call differently."""


@dataclass(frozen=True)
class Request:
    """What a script asks for: the configuration, and the rows that must be kept in the run folder."""

    config: Config
    rows: Rows | Saved | None = None


def request_of(
    model: str | Path | None,
    dataset: Dataset | None,
    rewards: Sequence[str],
    reward_weights: Sequence[float] | None,
    config: Config | None,
    keys: Mapping[str, Any],
) -> Request:
    """Keys are above `config`; `rewards` are names. A mistake is a UserError with one line per mistake."""
    layers = [config_layer(config), layer_of(keys)]
    if model is not None:
        layers.append({"model": _model_name(model)})
    if dataset is not None:
        layers.append({"task": _task_of(dataset)})
    if rewards:
        layers.append({"reward": {"functions": list(rewards)}})
    if reward_weights is not None:
        layers.append({"reward": {"weights": list(reward_weights)}})
    return Request(merged_config(*layers), dataset if is_rows(dataset) else None)  # pyright: ignore


def config_layer(config: Config | None) -> dict[str, Any]:
    if config is not None and not isinstance(config, Config):
        raise UserError(f"config={config!r} is not a polyrhythm.Config")
    return config.model_dump() if config else {}


def layer_of(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments as nested keys: of a section's object those that were set."""
    for key in keys:
        if key in CALLED_HERE:
            raise UserError(f"{key} is called {CALLED_HERE[key]} here")
        if key not in Config.model_fields:
            raise UserError(explain_unknown(key))
    return {
        key: value.model_dump(exclude_unset=True) if isinstance(value, Section) else value
        for key, value in keys.items()
    }


def rewards_of(given: Reward | Sequence[Reward] | None) -> list[Reward]:
    """One or several, as a list."""
    rewards = [given] if isinstance(given, str) or callable(given) else list(given or [])
    for index, reward in enumerate(rewards):
        if not isinstance(reward, str) and not callable(reward):
            raise UserError(f"rewards[{index}] is {reward!r}: give a function, or the name of one")
    return rewards


def _model_name(model: object) -> str:
    if not isinstance(model, str | Path):
        raise UserError(
            f"model is a {type(model).__name__}: give the folder of a model, a hub id or a built-in name; "
            "model.save_pretrained(folder) and tokenizer.save_pretrained(folder) make such a folder"
        )
    return str(model)


def _task_of(dataset: Dataset) -> dict[str, Any]:
    if isinstance(dataset, type):
        return {"name": name_of_class(dataset)}
    if isinstance(dataset, str | Path):
        return {"name": "dataset", "options": {"path": str(dataset)}}
    if is_rows(dataset):
        return {"name": "dataset", "options": {"path": "(in the run folder)"}}
    raise UserError(f"dataset is a {type(dataset).__name__}: give {WHAT_IT_CAN_BE}")
