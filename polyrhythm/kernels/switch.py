"""The switch POLYRHYTHM_KERNELS: `off` for all kernels, `off:packed,decode` for those two; anything that is off runs on torch operators."""

import os
from pathlib import Path

from polyrhythm.errors import UserError

VARIABLE = "POLYRHYTHM_KERNELS"
SOURCES = Path(__file__).parent / "c"


def kernel_names() -> list[str]:
    return sorted(path.stem for path in SOURCES.glob("*.c"))


def is_on(name: str) -> bool:
    return name not in kernels_off()


def kernels_off() -> set[str]:
    """The kernels that the environment switches off; a value that means nothing is refused."""
    value = os.environ.get(VARIABLE, "on")
    if value in ("", "on"):
        return set()
    known = set(kernel_names())
    if value == "off":
        return known
    word, _, listed = value.partition(":")
    names = set(filter(None, listed.split(",")))
    if word == "off" and names and names <= known:
        return names
    raise UserError(f"{VARIABLE}={value!r} is not known: use on, off, or off: and some of {','.join(sorted(known))}")
