"""Kernels in C: compiled for this machine when they are first needed, and kept in the user's cache.

Without a working C compiler there are none; callers then use torch operators.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from torch import Tensor

from polyrhythm.cache import cache_dir

_SOURCES = Path(__file__).parent
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared")
_COMPILE_DEADLINE_S = 60.0
LANES = 16
"""Numbers of a vector: head dimensions must be a multiple of it."""

log = logging.getLogger(__name__)


@cache
def load_kernel(name: str, **constants: int) -> ctypes.CDLL | None:
    """The compiled library of `<name>.c` with these constants, or None where it cannot be had."""
    source = _SOURCES / f"{name}.c"
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        log.warning("no C compiler: attention uses torch operators, which is slower")
        return None
    arguments = [*_FLAGS, *(f"-D{key}={value}" for key, value in sorted(constants.items()))]
    texts = [path.read_text() for path in (source, *sorted(_SOURCES.glob("*.h")))]
    key = hashlib.sha256("\0".join([*texts, compiler, *arguments, _processor()]).encode()).hexdigest()
    library = cache_dir() / "kernels" / f"{name}-{key[:32]}.so"
    try:
        if not library.exists():
            _compile([compiler, *arguments], source, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        log.warning("kernel %s cannot be compiled (%s): attention uses torch operators", name, reason.strip())
        return None


def _compile(command: list[str], source: Path, library: Path) -> None:
    """With OpenMP, whose library torch has loaded already, or else for one thread; appears by one rename."""
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        for openmp in (["-fopenmp"], []):
            result = subprocess.run(
                [*command, *openmp, "-o", str(made), str(source), "-lm"],
                capture_output=True, text=True, timeout=_COMPILE_DEADLINE_S, check=not openmp,
            )  # fmt: skip
            if result.returncode == 0:
                break
        os.rename(made, library)


def _processor() -> str:
    """What the compiler sees as native: a cache in a shared home serves different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
