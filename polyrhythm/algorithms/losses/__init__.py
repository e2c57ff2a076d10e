"""The kinds of loss by name; `module:name` is a function of the user's. Nothing here imports torch."""

from typing import TYPE_CHECKING, cast

from polyrhythm.errors import UserError
from polyrhythm.user_code import find_kind

if TYPE_CHECKING:
    from polyrhythm.algorithms.loss import Loss

LOSSES = {"clipped": "polyrhythm.algorithms.losses.clipped:clipped"}


def find_loss(name: str) -> "Loss":
    """The function behind `algorithm.loss`; every mistake in the name is a `UserError`."""
    loss = find_kind("algorithm.loss", name, LOSSES, "loss")
    if not callable(loss):
        raise UserError(f"algorithm.loss={name!r} is not a function: name one that takes (inputs, config)")
    return cast("Loss", loss)


def check_loss(name: str) -> None:
    """Raise what `find_loss` would; what is built in is known without importing it."""
    if name not in LOSSES:
        find_loss(name)
