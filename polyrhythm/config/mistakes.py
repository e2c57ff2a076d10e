"""What is wrong with a configuration, in words that name the key, the value and the fix."""

import difflib
from typing import Any

from pydantic import BaseModel

from polyrhythm.config.other_names import explain_name, explain_value
from polyrhythm.config.sections import Config, Section


def all_keys() -> list[str]:
    """Every key of a configuration, dotted."""
    return dotted_keys({name: _keys_of(field.annotation) for name, field in Config.model_fields.items()})


def _keys_of(annotation: Any) -> dict[str, None] | None:
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return dict.fromkeys(annotation.model_fields) if is_section else None


def dotted_keys(nested: dict[str, Any]) -> list[str]:
    inner = {key: dotted_keys(value) if isinstance(value, dict) else [] for key, value in nested.items()}
    return [dotted for key, below in inner.items() for dotted in ([f"{key}.{rest}" for rest in below] or [key])]


def explain(mistake: Any) -> str:
    key = ".".join(str(part) for part in mistake["loc"])
    if said := explain_value(key, mistake["input"]):
        return said
    if mistake["type"] == "extra_forbidden":
        if said := explain_name(key):
            return said
        return f"unknown key {key}={mistake['input']!r}{_did_you_mean(mistake['loc'])}"
    if mistake["type"] == "value_error":  # a check of ours, which names the keys
        return str(mistake["ctx"]["error"])
    message = mistake["msg"][0].lower() + mistake["msg"][1:]
    return f"{key}={mistake['input']!r} is not valid: {message}"


def _did_you_mean(location: tuple[str | int, ...]) -> str:
    fields = Config.model_fields
    for part in location[:-1]:
        annotation = fields[str(part)].annotation if str(part) in fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return ""
        fields = annotation.model_fields
    close = difflib.get_close_matches(str(location[-1]), fields, n=1)
    return f": did you mean {close[0]}?" if close else f": known keys here are {', '.join(fields)}"
