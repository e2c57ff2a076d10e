"""Where code lies that a configuration names: beside its file or in the working directory, found once, when it is loaded."""

from pathlib import Path
from typing import Any

NAMING_CODE = ("task.name", "reward.functions", "algorithm.loss", "training.optimizer", "observe.loggers")
"""Keys whose values, or some of them, are `module:name` or `file.py:name`."""


def with_places(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The values with absolute paths for files of code in `folder` or the working directory.

    So every process of a run finds them, and one that is started elsewhere to go on with it. A module stays a module, unless
    `folder` has a file of that name and the working directory has none.
    """
    placed = dict(values)
    for section, _, key in (name.partition(".") for name in NAMING_CODE):
        keys = placed.get(section)
        if isinstance(keys, dict) and key in keys:
            value = keys[key]
            names = [_place(name, folder) for name in value] if isinstance(value, list) else _place(value, folder)
            placed[section] = keys | {key: names}
    reward = placed.get("reward")
    if isinstance(reward, dict) and isinstance(reward.get("options"), dict):
        placed["reward"] = reward | {"options": {_place(name, folder): of for name, of in reward["options"].items()}}
    return placed


def _place(name: Any, folder: Path) -> Any:
    if not isinstance(name, str) or ":" not in name:
        return name
    module, _, attribute = name.rpartition(":")
    here = Path.cwd()
    if module.endswith(".py"):
        found = next((path for path in (folder / module, here / module) if path.exists()), None)
    else:
        is_here = (here / module).is_dir() or (here / f"{module}.py").exists()
        found = None if is_here else folder / f"{module}.py"
    return f"{found.resolve()}:{attribute}" if found is not None and found.exists() else name
