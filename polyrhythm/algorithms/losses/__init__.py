"""The kinds of loss by name; `module:name` is a function of the user's. Nothing here imports torch."""

from typing import TYPE_CHECKING, cast

from polyrhythm.errors import UserError
from polyrhythm.user_code import import_attribute

if TYPE_CHECKING:
    from polyrhythm.algorithms.loss import Loss

LOSSES = {"clipped": "polyrhythm.algorithms.losses.clipped:clipped"}


def find_loss(name: str) -> "Loss":
    """The function behind `algorithm.loss`; every mistake in the name is a `UserError`."""
    module_name, colon, attribute = LOSSES.get(name, name).partition(":")
    if not (module_name and colon and attribute):
        raise UserError(f"algorithm.loss={name!r} is not a loss: use {', '.join(LOSSES)} or module:name")
    try:
        loss = import_attribute(module_name, attribute)
    # A module of the user's can fail in any way while it is imported.
    except Exception as error:
        raise UserError(
            f"algorithm.loss={name!r} cannot be imported: {type(error).__name__}: {error}; "
            "is it in the working directory or in PYTHONPATH?"
        ) from error
    if not callable(loss):
        raise UserError(f"algorithm.loss={name!r} is not a function: name one that takes (inputs, config)")
    return cast("Loss", loss)


def check_loss(name: str) -> None:
    """Raise what `find_loss` would; what is built in is known without importing it."""
    if name not in LOSSES:
        find_loss(name)
