"""Compiles a C file for this machine, once for each set of constants, and loads the result."""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from polyrhythm.cache import cache_dir
from polyrhythm.kernels.switch import SOURCES, is_on

_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared")
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_DEADLINE_S = 60.0

# The widest vector of any machine, in numbers: rows of a multiple of this length suit the vectors of every machine.
WIDEST_VECTOR = 16

# What C functions take.
POINTER, COUNT, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float

log = logging.getLogger(__name__)


def load_kernel(
    name: str, declare: Callable[[ctypes.CDLL], None], **shared: int | tuple[str, ...]
) -> ctypes.CDLL | None:
    """The library of `c/<name>.c`, or None where it is switched off or cannot be had.

    `declare` says what its functions take. What C and Python share is said in Python and becomes macros of the C file:
    numbers, and the names of a struct's fields in their order.
    """
    return _loaded(name, declare, **shared) if is_on(name) else None


def forget_kernels() -> None:
    """Look for compiler and libraries anew at the next use."""
    _loaded.cache_clear()


@cache
def _loaded(name: str, declare: Callable[[ctypes.CDLL], None], **shared: int | tuple[str, ...]) -> ctypes.CDLL | None:
    source = SOURCES / f"{name}.c"
    command = (
        shlex.split(os.environ.get("CC", "")) or [found for known in _COMPILERS if (found := shutil.which(known))][:1]
    )
    if not command:
        log.warning("no C compiler: torch operators are used, which are slower")
        return None
    arguments = [*_FLAGS, *_macros(shared | {"WIDEST_VECTOR": WIDEST_VECTOR})]
    texts = [path.read_text() for path in (source, *sorted(SOURCES.glob("*.h")))]
    key = hashlib.sha256("\0".join([*texts, *command, *arguments, _processor()]).encode()).hexdigest()
    library = cache_dir() / "kernels" / f"{name}-{key[:32]}.so"
    try:
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_mine_alone(library.parent):
            raise OSError(f"{library.parent} can be written by others: chmod 700 it, or set POLYRHYTHM_CACHE")
        if not library.exists():
            _compile([*command, *arguments], source, library)
        kernel = ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        with contextlib.suppress(OSError):  # one that is there and cannot be loaded is compiled again the next time
            library.unlink()
        reason = getattr(error, "stderr", None) or str(error)
        log.warning("kernel %s cannot be compiled (%s): torch operators are used", name, reason.strip())
        return None
    declare(kernel)
    return kernel


def _macros(shared: dict[str, int | tuple[str, ...]]) -> list[str]:
    texts = {key: ",".join(value) if isinstance(value, tuple) else str(value) for key, value in shared.items()}
    return [f"-D{key}={text}" for key, text in sorted(texts.items())]


def _compile(command: list[str], source: Path, library: Path) -> None:
    """With OpenMP, whose library torch has loaded already; appears by one rename."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        subprocess.run(
            [*command, "-o", str(made), str(source), "-lm"],
            capture_output=True, text=True, timeout=_COMPILE_DEADLINE_S, check=True,
        )  # fmt: skip
        os.rename(made, library)


def _is_mine_alone(folder: Path) -> bool:
    """Whether nobody else can put code there."""
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _processor() -> str:
    """What the compiler sees as native: a cache in a shared home serves different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
