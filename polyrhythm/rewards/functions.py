"""Reward functions by name, checked before a run starts, and the command that runs them in a worker."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyrhythm
from polyrhythm.config import RewardConfig
from polyrhythm.errors import UserError
from polyrhythm.rewards.sandbox.frames import Hello, RewardSignature, split_frame
from polyrhythm.types import Problem
from polyrhythm.user_code import import_attribute

START_DEADLINE_S = 60.0
ALLOWED_VARIABLES = {
    *("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME"),
}


def choose_rewards(config: RewardConfig, own: str | None) -> dict[str, float]:
    """The functions that score this run, each with its weight: those of the configuration, or the task's own."""
    functions = config.functions or ([own] if own else [])
    if not functions:
        raise UserError(
            "reward.functions is empty and the task has no reward of its own: "
            'give your function, such as reward.functions = ["my_rewards:score"]'
        )
    return dict(zip(functions, config.weights or [1.0] * len(functions), strict=True))


def resolve_reward(spec: str) -> Callable[..., Any]:
    """The function that `module:function` names; modules in the working directory are found too."""
    module_name, colon, function_name = spec.partition(":")
    if not (module_name and colon and function_name):
        raise UserError(f"reward {spec!r} is not of the form module:function")
    try:
        function = import_attribute(module_name, function_name)
    except AttributeError as error:
        raise UserError(f"reward {spec!r}: {error}") from error
    except ModuleNotFoundError as error:
        raise UserError(
            f"reward {spec!r} cannot be imported: {error}: is it in the working directory, or in PYTHONPATH?"
        ) from error
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise UserError(f"reward {spec!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UserError(f"reward {spec!r} is {function!r}, which cannot be called")
    return function


def import_in_worker(rewards: dict[str, float], memory_mb: int = 0) -> list[RewardSignature]:
    """What the rewards need; UserError unless a worker, with its scrubbed environment and its limits, can import them."""
    named = " and ".join(map(repr, rewards))
    try:
        done = subprocess.run(
            worker_command(rewards, memory_mb),
            env=worker_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"reward {named}: importing it took longer than {START_DEADLINE_S:.0f} s") from error
    hello = split_frame(done.stdout, Hello)
    if hello is None:
        last_line = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise UserError(f"reward {named} ended its worker (exit code {done.returncode}) on importing it: {last_line}")
    if hello.error is not None:
        raise UserError(hello.error)
    return hello.signatures


def check_columns(signatures: list[RewardSignature], problem: Problem) -> None:
    """Raise UserError if a reward cannot be called with what the problem has."""
    for signature in signatures:
        missing = [name for name in signature.required if name not in problem.columns]
        if missing:
            there_are = f"only {', '.join(problem.columns)}" if problem.columns else "none"
            raise UserError(
                f"reward {signature.function!r} needs the column {missing[0]!r}, and problem {problem.index} has "
                f"{there_are}: add it to the problems, or give the parameter {missing[0]!r} a default"
            )


def worker_command(rewards: dict[str, float], memory_mb: int) -> list[str]:
    return [sys.executable, "-m", "polyrhythm.rewards.sandbox.worker", json.dumps(rewards), str(memory_mb)]


def worker_environment() -> dict[str, str]:
    """What a worker may see of the environment: paths and language, never tokens or keys."""
    environment = {
        name: value for name, value in os.environ.items() if name in ALLOWED_VARIABLES or name.startswith("LC_")
    }
    package_parent = str(Path(polyrhythm.__file__).resolve().parents[1])
    inherited_path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{package_parent}{os.pathsep}{inherited_path}" if inherited_path else package_parent
    environment["OMP_NUM_THREADS"] = "1"
    return environment
