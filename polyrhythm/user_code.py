"""Code of the user's, by name."""

import importlib
import importlib.util
import inspect
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from polyrhythm.config import explain_name
from polyrhythm.errors import UserError


def import_attribute(module_name: str, attribute: str) -> Any:
    """What a module, or a file if the name ends with .py, calls so; modules in the working directory are found too.

    Raises whatever importing it raises.
    """
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    if module_name.endswith(".py"):
        return getattr(_import_file(Path(module_name)), attribute)
    return getattr(importlib.import_module(module_name), attribute)


def _import_file(path: Path) -> ModuleType:
    """The module of a file, under a name that no other has: a reward may well be in a file called math.py."""
    path = path.resolve()
    name = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ModuleNotFoundError(f"there is no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for what it imports from beside it
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def find_kind(key: str, name: str, known: Mapping[str, str], what: str) -> Any:
    """One of the `known` kinds (`module:attribute` by name), or one of the user's; a mistake is a UserError about `key`."""
    module_name, colon, attribute = known.get(name, name).rpartition(":")
    if not (module_name and colon and attribute):
        choices = f"{', '.join(known)} or " if known else ""
        raise UserError(f"{key}={name!r} is not a {what}: use {choices}module:name, also as file.py:name")
    try:
        return import_attribute(module_name, attribute)
    # A module of the user's can fail in any way while it is imported.
    except Exception as error:
        raise UserError(
            f"{key}={name!r} cannot be imported: {type(error).__name__}: {error}; "
            "is it in the working directory, beside the configuration file or in PYTHONPATH?"
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
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, value in options.items():
        if name not in parameters and not takes_any:
            if why := explain_name(f"{key}.{name}"):
                raise UserError(why)
            known = ", ".join(parameters) or "none"
            raise UserError(f"{key}.{name}={value!r} is not an option of {what}: it has {known}")
    for name, parameter in parameters.items():
        is_named = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if is_named and parameter.default is parameter.empty and name not in options:
            raise UserError(f"{key}.{name} is missing: {what} needs it")


def _describe(key: str, mistake: Any) -> str:
    """What pydantic found; a mistake of several options together has no place."""
    place = ".".join([key, *map(str, mistake["loc"])])
    value = "" if not mistake["loc"] else f"={mistake['input']!r}"
    return f"{place}{value} is wrong: {mistake['msg'].removeprefix('Value error, ')}"
