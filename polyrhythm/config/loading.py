"""From files and flags to a checked configuration: defaults, then TOML files in order, then dotted flags."""

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import CliSettingsSource
from pydantic_settings.exceptions import SettingsError

from polyrhythm.config.mistakes import dotted_keys, explain
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
    except SettingsError as error:
        raise UserError(f"{error}: write JSON, such as --task.options '{{\"digits\": 2}}', or digits=2") from None


def load_config(files: list[Path], flags: dict[str, Any] | None = None) -> Config:
    """Defaults, then the TOML files in order, then the flags; a mistake is a UserError with one line per mistake."""
    merged: dict[str, Any] = {}
    for path in files:
        merged = _merge(merged, _read_toml(path))
    return _checked(_merge(merged, flags or {}))


def _checked(values: dict[str, Any]) -> Config:
    try:
        return Config(**values)
    except ValidationError as error:
        raise UserError("\n".join(explain(mistake) for mistake in error.errors())) from None


CHANGEABLE_ON_RESUME = (
    "num_steps", "cluster", "engine", "conductor", "observe", "reward.num_workers", "reward.deadline_s",
    "reward.memory_mb", "training.learning_rate", "training.max_grad_norm", "training.checkpoint_every",
    "training.num_ranks", "training.threads",
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
    try:
        saved = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not what a run has written: {error}") from None
    return _checked(_merge(saved, flags))


def save_config(config: Config, path: Path) -> None:
    path.write_text(json.dumps(config.model_dump(), indent=2) + "\n")


def read_saved_config(path: Path) -> Config:
    return _checked(json.loads(path.read_text()))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read configuration {path}: {error.strerror}") from None
    except ValueError as error:  # no TOML, or not even text
        raise UserError(f"{path} is not valid TOML: {error}") from None


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        merged[key] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged
