"""TRL and verl as they are published, in a folder of their own: what they bring must not change what the other tests see.

They are installed without what they depend on, so that our pins stay; TRL's rewards need nothing that we do not have.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINS = Path(__file__).with_name("constraints-rewards.txt")
FOLDER = ROOT / ".venv-trl-rewards"
PINS_INSTALLED = FOLDER / PINS.name
INSTALL_DEADLINE_S = 600


def make_folder() -> Path:
    """The folder to put on a worker's PYTHONPATH; made when it is missing or the pins have changed."""
    if PINS_INSTALLED.is_file() and PINS_INSTALLED.read_bytes() == PINS.read_bytes():
        return FOLDER
    shutil.rmtree(FOLDER, ignore_errors=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-compile",
    ]
    command = [*pip, "--target", str(FOLDER), "--requirement", str(PINS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"
    # Last: a folder that was left half-made is made again.
    shutil.copy(PINS, PINS_INSTALLED)
    return FOLDER
