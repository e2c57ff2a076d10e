"""Code of the user's, by name."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from polyrhythm.config import explain_name
from polyrhythm.errors import UserError


def import_attribute(module_name: str, attribute: str) -> Any:
    """What a module calls so; modules in the working directory are found too. Raises whatever importing it raises."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module_name), attribute)


def find_kind(key: str, name: str, known: Mapping[str, str], what: str) -> Any:
    """One of the `known` kinds (`module:attribute` by name), or one of the user's; a mistake is a UserError about `key`."""
    module_name, colon, attribute = known.get(name, name).partition(":")
    if not (module_name and colon and attribute):
        choices = f"{', '.join(known)} or " if known else ""
        raise UserError(f"{key}={name!r} is not a {what}: use {choices}module:name")
    try:
        return import_attribute(module_name, attribute)
    # A module of the user's can fail in any way while it is imported.
    except Exception as error:
        raise UserError(
            f"{key}={name!r} cannot be imported: {type(error).__name__}: {error}; "
            "is it in the working directory or in PYTHONPATH?"
        ) from error


def call_with_options(key: str, factory: Callable[..., Any], options: Mapping[str, Any], what: str) -> Any:
    """`factory(**options)`; an option that it does not know, lacks or refuses is a UserError about `key`."""
    _check_option_names(key, factory, options, what)
    try:
        return factory(**options)
    except ValidationError as error:
        raise UserError("\n".join(_describe(key, mistake) for mistake in error.errors())) from error


def _check_option_names(key: str, factory: Callable[..., Any], options: Mapping[str, Any], what: str) -> None:
    parameters = inspect.signature(factory).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name, value in options.items():
        if name not in parameters:
            if why := explain_name(f"{key}.{name}"):
                raise UserError(why)
            known = ", ".join(parameters) or "none"
            raise UserError(f"{key}.{name}={value!r} is not an option of {what}: it has {known}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            raise UserError(f"{key}.{name} is missing: {what} needs it")


def _describe(key: str, mistake: Any) -> str:
    """What pydantic found; a mistake of several options together has no place."""
    place = ".".join([key, *map(str, mistake["loc"])])
    value = "" if not mistake["loc"] else f"={mistake['input']!r}"
    return f"{place}{value} is wrong: {mistake['msg'].removeprefix('Value error, ')}"
