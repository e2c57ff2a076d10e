"""Write docs/configuration.md from the schema: every key with its type, bounds, default and meaning."""

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, create_model
from pydantic.dataclasses import is_pydantic_dataclass

from polyrhythm.config import Config
from polyrhythm.rewards.kinds import REWARDS
from polyrhythm.tasks.registry import TASKS
from polyrhythm.user_code import find_kind

TARGET = Path(__file__).parent / "configuration.md"
HEAD = """# All keys

Written by `make docs` from the schema, `polyrhythm/config/sections.py`; `polyrhythm train --help` prints the same. How files and flags go together is in
[configuring.md](configuring.md); what the keys of other frameworks are called here is in [from_trl.md](from_trl.md) and [from_verl.md](from_verl.md).

In a file a key stands below its section, as a flag it has both names: `[rollout]` and then `group_size = 16`, or `--rollout.group_size 16`.

## A run

The keys above all sections.

"""
TASK_OPTIONS = """## Options of the built-in tasks

What `task.options` may hold, for each `task.name`.

"""
REWARD_OPTIONS = """## Options of the built-in rewards

What `reward.options` may hold below the name of a reward, such as `options = { format = { … } }`; [rewards.md](rewards.md) says more about each.

"""
KEY_TABLE = "| key | type | default | meaning |\n|---|---|---|---|\n"
OPTION_TABLE = "| option | type | default |\n|---|---|---|\n"
WORDS = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "table"}
PAGE = re.compile(r"docs/(\w+\.md)")
BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}


def page() -> str:
    schema = Config.model_json_schema()
    sections = {name: _section(schema, key) for name, key in schema["properties"].items()}
    keys = {name: key for name, key in schema["properties"].items() if sections[name] is None}
    blocks = [HEAD + _key_table(keys, "")]
    for name, section in sections.items():
        if section is not None:
            blocks.append(f"## [{name}]\n\n{section['description']}\n\n{_key_table(section['properties'], f'{name}.')}")
    tasks = [_options(name, find_kind("task.name", name, TASKS, "task")) for name in TASKS]
    rewards = [_options(name, find_kind("reward.functions", name, REWARDS, "reward")) for name in REWARDS]
    return "\n".join([*blocks, TASK_OPTIONS + "\n".join(tasks), REWARD_OPTIONS + "\n".join(rewards)])


def _section(schema: dict[str, Any], key: dict[str, Any]) -> dict[str, Any] | None:
    return schema["$defs"][key["$ref"].rpartition("/")[2]] if "$ref" in key else None


def _key_table(keys: dict[str, Any], before: str) -> str:
    rows = (
        f"| `{before}{name}` | {_type(key)} | `{_default(key)}` | {_one_line(key['description'])} |\n"
        for name, key in keys.items()
    )
    return KEY_TABLE + "".join(rows)


def _options(name: str, kind: Callable[..., Any]) -> str:
    return f"### {name}\n\n{_one_line(kind.__doc__)}\n\n{_option_table(kind)}"


def _option_table(kind: Callable[..., Any]) -> str:
    schema = _schema_of_arguments(kind)
    required = schema.get("required", ())
    rows = (
        f"| `{option}` | {_type(key)} | {'required' if option in required else f'`{_default(key)}`'} |\n"
        for option in inspect.signature(kind).parameters
        if (key := schema["properties"].get(option))
    )
    return OPTION_TABLE + "".join(rows)


def _schema_of_arguments(kind: Callable[..., Any]) -> dict[str, Any]:
    if is_pydantic_dataclass(kind):  # type: ignore[arg-type]
        return TypeAdapter(kind).json_schema()
    named = [p for p in inspect.signature(kind).parameters.values() if p.kind is not p.VAR_KEYWORD]
    fields = {p.name: (p.annotation, ... if p.default is p.empty else p.default) for p in named}
    return create_model("Arguments", **fields).model_json_schema()  # type: ignore[call-overload]


def _type(key: dict[str, Any]) -> str:
    """Such as `integer, at least 1`, or the values that are possible."""
    if "anyOf" in key:
        return " or ".join(_type(choice) for choice in key["anyOf"] if choice.get("type") != "null")
    if choices := key.get("enum", [key["const"]] if "const" in key else []):
        return " \\| ".join(f"`{json.dumps(choice)}`" for choice in choices)
    if "type" not in key:
        return "any"
    if key["type"] == "array":
        return f"list of {_type(key['items'])}" if key.get("items") else "list"
    bounds = [text.format(f"{key[name]:g}") for name, text in BOUNDS.items() if name in key]
    return ", ".join([WORDS[key["type"]], *bounds])


def _default(key: dict[str, Any]) -> str:
    """As it is written in a TOML file."""
    default = key.get("default", [] if key.get("type") == "array" else {})
    if default is None:
        return "none"
    return f"{default:g}" if isinstance(default, float) else json.dumps(default)


def _one_line(text: str) -> str:
    """For a cell of a table, with links to the pages that it names."""
    return PAGE.sub(_linked, " ".join(text.split()).replace("|", "\\|"))


def _linked(page: re.Match[str]) -> str:
    return f"[{page[1]}]({page[1]})" if (TARGET.parent / page[1]).exists() else page[0]


if __name__ == "__main__":
    TARGET.write_text(page())
