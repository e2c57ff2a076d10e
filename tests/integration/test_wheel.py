"""A wheel built from the repository works where it is installed: nothing of what runs here comes from the clone."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "polyrhythm")
KERNELS = ["decode", "elementwise", "packed", "product"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder into which the wheel was installed; built from a copy, because builds leave files behind."""
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "installed"))
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source]
    subprocess.run(build, cwd=source, timeout=200, check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-index", "--no-deps", "--target", target, wheel], cwd=wheels, timeout=200, check=True
    )
    return target


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs Python outside the clone with the installed package, and an empty cache of its own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "POLYRHYTHM"))}
    environment = kept | {"PYTHONPATH": str(installed), "POLYRHYTHM_CACHE": str(tmp_path / "cache")}

    def run(*arguments: str) -> str:
        outcome = subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250
        )
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
        return outcome.stdout

    return run


def files_of(package: Path) -> set[str]:
    paths = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(package)) for path in paths}


def test_every_file_of_the_package_is_in_the_wheel(installed):
    assert files_of(installed / "polyrhythm") == files_of(ROOT / "polyrhythm")


def test_the_command_of_the_wheel_says_what_it_can_do(installed, run):
    assert Path(run("-c", "import polyrhythm; print(polyrhythm.__file__)").strip()).is_relative_to(installed)
    assert "train" in run(str(installed / "bin" / "polyrhythm"), "--help")


def test_a_run_from_the_wheel_trains_with_kernels_compiled_from_its_own_sources(
    installed, run, tiny_model_dir, work_dir
):
    run(
        str(installed / "bin" / "polyrhythm"), "train", "--model", str(tiny_model_dir), "--num_steps", "1",
        "--task.name", "dataset", "--task.options", '{"path": "problems.jsonl"}',
        "--reward.functions", '["my_rewards:many_low_bytes"]', "--rollout.group_size", "2",
        "--rollout.groups_per_step", "2", "--rollout.max_tokens", "4", "--observe.view", "none", "--output_dir", "runs",
    )  # fmt: skip
    (trained,) = (work_dir / "runs").glob("*/model/model.safetensors")
    assert trained.read_bytes() != (tiny_model_dir / "model.safetensors").read_bytes()
    compiled = {path.name.split("-")[0] for path in (work_dir / "cache" / "kernels").glob("*.so")}
    assert sorted(compiled) == KERNELS, "this test needs a C compiler"
