"""Kernels in C: compiled for this machine when they are first needed, and kept in the user's cache.

Without a working C compiler there are none; callers then use torch operators.
"""

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
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from polyrhythm.cache import cache_dir

_SOURCES = Path(__file__).parent / "c"
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared")
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_DEADLINE_S = 60.0
LANES = 16
"""Numbers of the widest vector that kernels are compiled with: lengths of rows must be a multiple of it."""

log = logging.getLogger(__name__)


@cache
def load_kernel(name: str, **constants: int) -> ctypes.CDLL | None:
    """The compiled library of `<name>.c` with these constants, or None where it cannot be had."""
    source = _SOURCES / f"{name}.c"
    command = (
        shlex.split(os.environ.get("CC", "")) or [found for known in _COMPILERS if (found := shutil.which(known))][:1]
    )
    if not command:
        log.warning("no C compiler: torch operators are used, which are slower")
        return None
    arguments = [*_FLAGS, *(f"-D{key}={value}" for key, value in sorted(constants.items()))]
    texts = [path.read_text() for path in (source, *sorted(_SOURCES.glob("*.h")))]
    key = hashlib.sha256("\0".join([*texts, *command, *arguments, _processor()]).encode()).hexdigest()
    library = cache_dir() / "kernels" / f"{name}-{key[:32]}.so"
    try:
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_mine_alone(library.parent):
            raise OSError(f"{library.parent} can be written by others: chmod 700 it, or set POLYRHYTHM_CACHE")
        if not library.exists():
            _compile([*command, *arguments], source, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        with contextlib.suppress(OSError):  # one that is there and cannot be loaded is compiled again the next time
            library.unlink()
        reason = getattr(error, "stderr", None) or str(error)
        log.warning("kernel %s cannot be compiled (%s): torch operators are used", name, reason.strip())
        return None


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


def are_served(*tensors: Tensor) -> bool:
    """Whether kernels can read them: they know fp32 on a CPU."""
    return all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
