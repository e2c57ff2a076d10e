"""What is wrong with a configuration, in words that name the key, the value and the fix."""

import difflib
from typing import Any

from polyrhythm.config.other_names import explain_name, explain_value
from polyrhythm.config.section import Section
from polyrhythm.config.sections import Config


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
    """A mistake that pydantic found, in one line; an unknown section has a line for each of its keys."""
    key, value = ".".join(str(part) for part in mistake["loc"]), mistake["input"]
    if mistake["type"] == "extra_forbidden":
        return "\n".join(explain_unknown(unknown) for unknown in dotted_keys({key: value}))
    if mistake["type"] == "value_error":  # a check of ours, which names the keys
        return str(mistake["ctx"]["error"])
    if mistake["type"] in ("model_type", "dict_type", "model_attributes_type") and _keys_below(key):
        return f"{key}={value!r} is not valid: {key} is a section, with the keys {', '.join(_keys_below(key))}"
    message = mistake["msg"][0].lower() + mistake["msg"][1:]
    return explain_value(key, value) or f"{key}={value!r} is not valid: {message}"


def explain_unknown(key: str) -> str:
    """One line about a dotted key that there is not: what it is called here, what was meant, or what there is."""
    if said := explain_name(key):
        return said
    if meant := _meant(key):
        return f"unknown key {key}: did you mean {' or '.join(meant)}?"
    section = key.rpartition(".")[0]
    if beside := _keys_below(section):
        return f"unknown key {key}: known keys here are {', '.join(beside)}"
    return f"unknown key {key}: the sections are {', '.join(_sections())}; `polyrhythm train --help` lists all keys"


def _meant(key: str) -> list[str]:
    """The same name in other sections, or a similar one beside it, or a very similar one elsewhere."""
    section, _, name = key.rpartition(".")
    by_name: dict[str, list[str]] = {}
    for known in all_keys():
        by_name.setdefault(known.rpartition(".")[2], []).append(known)
    if name in by_name:
        return by_name[name]
    if close := difflib.get_close_matches(name, _keys_below(section), n=1):
        return [f"{section}.{close[0]}" if section else close[0]]
    close = difflib.get_close_matches(name, by_name, n=1, cutoff=0.8)
    return by_name[close[0]] if close else []


def _keys_below(section: str) -> list[str]:
    if not section:
        return list(Config.model_fields)
    return [key.removeprefix(f"{section}.") for key in all_keys() if key.startswith(f"{section}.")]


def _sections() -> list[str]:
    return list(dict.fromkeys(key.partition(".")[0] for key in all_keys() if "." in key))
