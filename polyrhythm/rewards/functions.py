"""Reward functions by name: which ones score a run, what they are called in its metrics, and how they are made."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from polyrhythm.config import RewardConfig
from polyrhythm.errors import UserError
from polyrhythm.rewards.kinds import REWARDS, make_reward
from polyrhythm.rewards.sandbox.frames import RewardFunction, WorkerSetup
from polyrhythm.user_code import import_attribute


def worker_setup(config: RewardConfig, own: str | None) -> WorkerSetup:
    """What the workers of a run are told."""
    return WorkerSetup(choose_rewards(config, own), config.memory_mb, config.environment)


def choose_rewards(config: RewardConfig, own: str | None) -> list[RewardFunction]:
    """The functions that score a run: those of the configuration, or the task's own."""
    specs = config.functions or ([own] if own else [])
    if not specs:
        raise UserError(
            "reward.functions is empty and the task has no reward of its own: "
            'give your function, such as reward.functions = ["my_rewards:score"]'
        )
    weights = config.weights or [1.0] * len(specs)
    names = short_names(specs)
    options = [config.options.get(spec, config.options.get(name)) for spec, name in zip(specs, names, strict=True)]
    unknown = [key for key in config.options if key not in {*specs, *names}]
    if unknown:
        raise UserError(f"reward.options has {unknown[0]!r}, which is none of the functions: {', '.join(names)}")
    return [
        RewardFunction(spec, name, weight, option)
        for spec, name, weight, option in zip(specs, names, weights, options, strict=True)
    ]


def short_names(specs: Sequence[str]) -> list[str]:
    """What metrics and samples call the functions: by their own names, with that of the module if two have the same."""
    parts = [spec.rpartition(":") for spec in specs]
    names = [function for _, _, function in parts]
    count = Counter(names)
    full = [
        f"{_stem(module)}.{name}" if module and count[name] > 1 else name
        for (module, _, _), name in zip(parts, names, strict=True)
    ]
    return [
        f"{name}_{full[:place].count(name) + 1}" if full[:place].count(name) else name
        for place, name in enumerate(full)
    ]


def make_function(reward: RewardFunction, held: Mapping[str, Callable[..., Any]] | None = None) -> Callable[..., Any]:
    """The function itself: built in, imported, or one of those `held` by this process; made by its factory if it has options."""
    if reward.spec in REWARDS:
        return make_reward(reward.spec, reward.options or {})
    function = _find(reward.spec, held or {})
    if reward.options is None:
        return function
    try:
        made = function(**reward.options)
    except Exception as error:  # the factory is the user's code, which may raise anything
        raise UserError(
            f"reward.options of {reward.name!r}, {reward.options}, are what its factory is called with, "
            f"and it raised {type(error).__name__}: {error}"
        ) from error
    if not callable(made):
        raise UserError(
            f"reward {reward.spec!r} has reward.options, so it must be a factory: called with them it returned "
            f"{made!r}, which is no function"
        )
    return made


def _find(spec: str, held: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    module_name, colon, function_name = spec.rpartition(":")
    if spec in held:
        return held[spec]
    if not (module_name and colon and function_name):
        raise UserError(
            f"reward {spec!r} is not of the form module:function or file.py:function, and not built in: "
            f"those are {', '.join(REWARDS)}"
        )
    try:
        function = import_attribute(module_name, function_name)
    except AttributeError as error:
        raise UserError(f"reward {spec!r}: {error}") from error
    except ModuleNotFoundError as error:
        raise UserError(
            f"reward {spec!r} cannot be imported: {error}: is it in the working directory, beside the configuration file "
            "or in PYTHONPATH?"
        ) from error
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise UserError(f"reward {spec!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UserError(f"reward {spec!r} is {function!r}, which cannot be called")
    return function


def _stem(module: str) -> str:
    """`rewards` of /home/me/rewards.py, `math` of my.rewards.math."""
    return PurePath(module).stem if module.endswith((".py", ".sock")) else module.rpartition(".")[2]
