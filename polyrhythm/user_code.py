"""Code of the user's, by name."""

import importlib
import os
import sys
from typing import Any


def import_attribute(module_name: str, attribute: str) -> Any:
    """What a module calls so; modules in the working directory are found too. Raises whatever importing it raises."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module_name), attribute)
