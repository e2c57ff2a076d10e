"""The script that starts a run: its modules are found by the run's processes too, and it must not start again in them."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyrhythm.errors import RunError, UserError


@contextmanager
def script_modules_found() -> Iterator[None]:
    """Processes that are started in this block can import what this one can, such as modules beside the script."""
    before = os.environ.get("PYTHONPATH")
    installed = (sys.prefix, sys.base_prefix)  # every process of this interpreter finds these; another's must not
    paths = [str(Path(path).resolve()) for path in sys.path if path and not path.startswith(installed)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextmanager
def errors_without_our_frames() -> Iterator[None]:
    """Who made a mistake in a notebook sees the line that says so, and not where in this package it was found."""
    try:
        yield
    except (UserError, RunError) as error:
        raise type(error)(*error.args) from None


def name_of_class(found: type) -> str:
    """`module:Class`, by which the run's processes find a class of the caller's."""
    module = found.__module__
    if module == "__main__":
        script = getattr(sys.modules["__main__"], "__file__", None)
        if script is None:
            raise UserError(
                f"the class {found.__qualname__} is in no file, and other processes must find it: write it into a module"
            )
        module = Path(script).stem
    return f"{module}:{found.__qualname__}"


def refuse_while_imported(called: str) -> None:
    """A script whose classes or functions are found by name is imported by other processes, and must not train there."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_load_unlocked" and "importlib" in frame.f_code.co_filename:
            spec = frame.f_locals.get("spec")
            where = f" ({spec.origin})" if spec is not None else ""
            raise UserError(
                f"{called}() is called by a module{where} that is only being imported: "
                'write it below `if __name__ == "__main__":`'
            )
        frame = frame.f_back
