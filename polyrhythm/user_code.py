"""Code of the user's, by name."""

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

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
        raise UserError(f"{key}={name!r} is not a {what}: use {', '.join(known)} or module:name")
    try:
        return import_attribute(module_name, attribute)
    # A module of the user's can fail in any way while it is imported.
    except Exception as error:
        raise UserError(
            f"{key}={name!r} cannot be imported: {type(error).__name__}: {error}; "
            "is it in the working directory or in PYTHONPATH?"
        ) from error
