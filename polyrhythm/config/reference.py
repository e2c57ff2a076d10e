"""Every key with its default and its meaning, as text: what `polyrhythm train --help` shows."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from polyrhythm.config.sections import Config

COLUMN = 35


def describe_keys(width: int) -> str:
    """All keys as flags, section by section: `--key default`, and what it means."""
    general = [name for name, field in Config.model_fields.items() if not _is_section(field.annotation)]
    blocks = ["A run: each key with its default\n" + "\n".join(_lines(Config, general, "--", width))]
    for name, field in Config.model_fields.items():
        section: Any = field.annotation
        if _is_section(section):
            heading = f"[{name}] {section.__doc__}"
            blocks.append("\n".join([heading, *_lines(section, list(section.model_fields), f"--{name}.", width)]))
    return "\n\n".join(blocks)


def _lines(model: type[BaseModel], names: list[str], before: str, width: int) -> Iterator[str]:
    for name in names:
        field = model.model_fields[name]
        flag = f"  {before}{name} {_written(field.default)}"
        if isinstance(field.default, bool):  # a switch has no value behind it
            flag = f"  --{'[no-]' if field.default else ''}{before.removeprefix('--')}{name}"
        text = textwrap.wrap(_meaning(field), max(40, width - COLUMN)) or [""]
        if len(flag) > COLUMN - 2:
            yield flag
        else:
            yield f"{flag:{COLUMN}}{text.pop(0)}"
        yield from (" " * COLUMN + line for line in text)


def _meaning(field: FieldInfo) -> str:
    """The description, behind the values that are possible where it does not name them itself."""
    text = " ".join((field.description or "").split())
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return text if all(choice in text for choice in choices) else f"{' | '.join(choices)}: {text}"


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _written(default: Any) -> str:
    """As it would be written behind a flag."""
    if isinstance(default, str):
        return default or '""'
    return f"{default:g}" if isinstance(default, float) else json.dumps(default)
