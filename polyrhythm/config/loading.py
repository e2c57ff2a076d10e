"""From files and flags to a checked configuration: defaults, then TOML files in order, then dotted flags."""

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

from pydantic_settings import CliSettingsSource
from pydantic_settings.exceptions import SettingsError

from polyrhythm.config.code_places import with_places
from polyrhythm.config.mistakes import dotted_keys
from polyrhythm.config.other_names import explain_name
from polyrhythm.config.sections import Config
from polyrhythm.errors import UserError


def add_flags(parser: argparse.ArgumentParser) -> CliSettingsSource:
    """Give `parser` one dotted flag per key; `source(parsed_args=...)` returns what was set."""
    return CliSettingsSource(
        Config, root_parser=parser, cli_hide_none_type=True, cli_avoid_json=True, cli_exit_on_error=True,
        cli_kebab_case=False, cli_implicit_flags=True,
    )  # fmt: skip


def read_flags(source: CliSettingsSource, parsed: argparse.Namespace) -> dict[str, Any]:
    """What was set by flags, nested like the configuration."""
    try:
        return source(parsed_args=parsed)()
    except SettingsError as error:  # "Parsing error encountered for task.options: ..."
        key = str(error).partition(" for ")[2].partition(":")[0]
        raise UserError(
            f"--{key} cannot be read: write JSON, such as --task.options '{{\"digits\": 2}}' "
            "or --reward.functions '[\"my_rewards:score\"]'"
        ) from None


def load_config(files: list[Path], flags: dict[str, Any] | None = None) -> Config:
    """Defaults, then the files in order, then the flags; a mistake is a UserError with one line per mistake.

    A file is TOML, or the config.json of an earlier run, which it then repeats.
    """
    return merged_config(*(with_places(_read_file(file), file.parent) for file in files), flags or {})


def merged_config(*layers: dict[str, Any]) -> Config:
    """Defaults, then nested keys, later ones above earlier ones; a mistake is a UserError with one line per mistake."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = _merge(merged, with_places(layer, Path.cwd()))
    return Config(**merged)


CHANGEABLE_ON_RESUME = (
    "num_steps", "cluster", "engine", "conductor", "observe", "reward.num_workers", "reward.deadline_s",
    "reward.memory_mb", "reward.environment", "training.learning_rate", "training.max_grad_norm", "training.checkpoint_every",
    "training.keep_checkpoints", "training.save_dtype", "training.num_ranks", "training.parallel",
    "training.ranks_per_replica", "training.ranks_elsewhere", "training.elastic", "training.min_ranks", "training.max_ranks",
    "training.resources", "training.threads", "weights", "task.epochs",
)  # fmt: skip


def load_resumed_config(run_dir: Path, flags: dict[str, Any]) -> Config:
    """The configuration of an earlier run with what may change while it goes on."""
    path = run_dir / "config.json"
    for needed in (path, run_dir / "run.json"):
        if not needed.exists():
            raise UserError(f"--resume {run_dir} is not a run folder: it has no {needed.name}")
    for key in dotted_keys(flags):
        if not any(f"{key}.".startswith(f"{changeable}.") for changeable in CHANGEABLE_ON_RESUME):
            raise UserError(f"{key} cannot change on --resume: only {', '.join(CHANGEABLE_ON_RESUME)} can")
    return merged_config(_read_file(path), flags)


def save_config(config: Config, path: Path) -> None:
    path.write_text(json.dumps(config.model_dump(), indent=2) + "\n")


def read_saved_config(path: Path) -> Config:
    return Config(**_read_file(path))


def _read_file(path: Path) -> dict[str, Any]:
    is_json = path.suffix == ".json"
    try:
        text = path.read_text()
        values = json.loads(text) if is_json else tomllib.loads(text)
    except IsADirectoryError:
        raise UserError(
            f"{path} is a folder: {path}/config.json repeats the run in it, --resume {path} goes on with it"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read configuration {path}: {error.strerror}{_meant_as_a_key(path)}") from None
    except ValueError as error:  # neither, or not even text
        raise UserError(f"{path} is not valid {'JSON' if is_json else 'TOML'}: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a configuration: it holds no keys")
    return values


FLAG_HAS_NO_VALUE = "a key that is true or false is given as --key or --no-key, without a value"


def _meant_as_a_key(path: Path) -> str:
    if str(path).lower() in ("true", "false"):
        return f"; {FLAG_HAS_NO_VALUE}"
    key, equals, value = str(path).partition("=")
    if not equals:
        return ""
    return f"; {explain_name(key) or f'keys are given as flags, such as --{key} {value}'}"


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        merged[key] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged
