"""The shape of the code: which way imports go, how large folders, files and functions are, who may import what."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from polyrhythm.cli.main import COMMANDS

PACKAGE = Path(__file__).parents[2] / "polyrhythm"
FILES = sorted(PACKAGE.rglob("*.py"))

# A room may import rooms of a lower level, and itself.
LEVELS = {
    "__init__": 9, "errors": 0, "types": 0, "messages": 0, "config": 0, "tokenizer": 0, "cache": 0, "user_code": 0, "interrupts": 0,
    "devices": 0, "models": 0, "environments": 0,
    "http": 1, "setups": 1, "kernels": 1, "observe": 1,
    "tasks": 2, "rewards": 2, "algorithms": 2, "weights": 2,
    "rollout": 3,
    "engine": 4, "conductor": 4, "loader": 4, "training": 4,
    "chaos": 5, "doctor": 5, "cluster": 6, "loop": 7, "runs": 7, "cli": 8, "__main__": 9,
}  # fmt: skip
WITHOUT_TORCH = [
    "conductor.service",
    "loader",
    "rollout",
    "tasks",
    "rewards",
    "rewards.sandbox.worker",
    "observe.terminal.view",
    "tokenizer",
    "cluster.supervisor",
    "cli.main",
]


MODULES_PER_FOLDER = 12
COMMANDS_FOLDER = PACKAGE / "cli"
"""One file per command, and nothing else: it grows with what a user can type."""
IN_ONE_FILE = ("vllm", "ray", "wandb", "peft", "datasets", "prometheus_client", "math_verify", "reasoning_gym", "tensorboard", "trackio",
               "mlflow")  # fmt: skip
"""Libraries of one kind of thing: whoever replaces one touches one file."""


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module] + [
                f"{node.module}.{alias.name}" for alias in node.names if node.module == "polyrhythm"
            ]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        rooms |= {m.split(".")[1] for m in modules if m.startswith("polyrhythm.")}
    return {room for room in rooms if room != "__version__"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    room = room_of(path)
    wrong = {other for other in imported_rooms(path) if other != room and LEVELS[other] >= LEVELS[room] > 0}
    assert not wrong, f"{room} (level {LEVELS[room]}) imports {wrong}"


def test_every_room_has_a_level():
    rooms = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert rooms == set(LEVELS), rooms ^ set(LEVELS)


def test_folders_stay_small():
    sizes = {folder: len(list(folder.glob("*.py"))) - 1 for folder in PACKAGE.rglob("*") if folder.is_dir()}
    assert sizes.pop(COMMANDS_FOLDER) == len(COMMANDS) + 1, "a file for each command, and main.py"
    assert not {str(folder): size for folder, size in sizes.items() if size > MODULES_PER_FOLDER}


@pytest.mark.parametrize("library", IN_ONE_FILE)
def test_the_library_of_a_kind_is_imported_in_one_file(library):
    files = [path for path in FILES if library in libraries_of(path)]
    assert len(files) <= 1, files


def libraries_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_these_parts_never_import_torch(module):
    code = f"import sys, polyrhythm.{module}; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_no_file_is_above_400_lines_and_no_function_above_80():
    long = [f"{p} ({n})" for p in FILES if (n := p.read_text().count("\n")) > 400]
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                if size > 80:
                    long.append(f"{path}:{node.name} ({size})")
    assert not long, long


def test_only_kernels_know_c():
    """And the worker of rewards, which asks the kernel of the machine to end it with its parent."""
    bound = [path.relative_to(PACKAGE) for path in FILES if "ctypes" in path.read_text()]
    outside = [str(path) for path in bound if path.parts[0] != "kernels"]
    assert outside == ["rewards/sandbox/worker.py"]


def test_nothing_loads_or_writes_pickles():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not {"pickle", "cloudpickle", "dill", "shelve"} & set(names), path
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.save", "eval", "exec"):
                raise AssertionError(f"{path}:{node.lineno} {ast.unparse(node.func)}")


@pytest.mark.parametrize("command", [["-c", "import polyrhythm"], ["-m", "polyrhythm", "--help"]])
def test_import_and_help_load_nothing_heavy(command):
    listing = subprocess.run([sys.executable, "-X", "importtime", *command], capture_output=True, text=True, timeout=60)
    assert listing.returncode == 0
    loaded = {line.rsplit("|", 1)[-1].strip() for line in listing.stderr.splitlines() if "|" in line}
    assert not {"torch", "transformers", "aiohttp", "pydantic", "rich", "numpy"} & loaded
