"""The problems of one run: which are trained on, in which order, which are held out, which are too long."""

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from polyrhythm.config import Config
from polyrhythm.errors import UserError
from polyrhythm.tasks.encoding import PromptText
from polyrhythm.tasks.stream import ProblemStream
from polyrhythm.tasks.task import Task
from polyrhythm.types import Problem

NUM_ENDLESS_CHECKED = 64


class RunProblems(NamedTuple):
    """What a run makes of its task."""

    stream: ProblemStream
    held_out: list[int]
    """Indices that are never trained on, in the task's order."""
    too_long: list[int]
    """Indices whose prompts are too long, as far as they were looked for."""


def open_problems(config: Config, task: Task, text: PromptText) -> RunProblems:
    """The problems of a run that was checked: prompts are measured only if some may have to be dropped."""
    to_drop = config.prompt.too_long == "drop" and task.num_problems is not None
    return choose_problems(
        config, task, find_too_long(config, task, text, problems_to_check(config, task)) if to_drop else []
    )


def choose_problems(config: Config, task: Task, too_long: list[int]) -> RunProblems:
    """The problems to train on; UserError if none are left, or if they do not suffice for the run."""
    held_out = hold_out(task, config.task.holdout)
    dropped = set(too_long) if config.prompt.too_long == "drop" else set()
    stream = ProblemStream(task, config.seed, shuffle=config.task.shuffle, left_out={*held_out, *dropped})
    if not stream.smallest_part:
        which = "a part of the mixture has" if stream.num_problems else "there are"
        raise UserError(
            f"{which} no problems left to train on: {len(dropped)} of {task.num_problems} are too long, "
            f"task.holdout={config.task.holdout} keeps {len(held_out)} back"
        )
    _check_epochs(config, stream)
    return RunProblems(stream, [index for index in held_out if index not in dropped], too_long)


def hold_out(task: Task, share: float) -> list[int]:
    """A share of the indices that depends on nothing but their number: runs of other seeds, and runs that begin with the
    weights of an earlier one, hold out the same, and a larger share holds a smaller one."""
    if not share:
        return []
    if task.num_problems is None:
        raise UserError(f"task.holdout={share}: this task has no end, so there is no share to hold out: leave it at 0")
    num_held_out = round(task.num_problems * share)
    if not 0 < num_held_out < task.num_problems:
        raise UserError(f"task.holdout={share} of {task.num_problems} problems is {num_held_out}: none or all of them")
    order = list(range(task.num_problems))
    random.Random("holdout").shuffle(order)
    return sorted(order[:num_held_out])


def problems_to_check(config: Config, task: Task) -> Iterator[Problem]:
    """All problems of a task that has an end, in its own order; else the first that the run will meet."""
    if task.num_problems is None:
        yield from ProblemStream(task, config.seed).take(0, NUM_ENDLESS_CHECKED)
    else:
        yield from map(task.problem, range(task.num_problems))


def find_too_long(config: Config, task: Task, text: PromptText, problems: Iterable[Problem]) -> list[int]:
    """The indices of those whose prompts leave no room for a completion; UserError where that is a mistake."""
    too_long = []
    for index, num_tokens in text.lengths(problems):
        if num_tokens > text.max_prompt_tokens:
            too_long.append(index)
            if fixes := _fixes(config, task):
                raise UserError(
                    f"problem {index} of task {config.task.name!r} has a prompt of {num_tokens} tokens; with rollout.max_tokens="
                    f"{config.rollout.max_tokens} that is longer than the context of {text.context_length} tokens: "
                    f"shorten the prompt, lower rollout.max_tokens{text.or_longer} or {fixes}"
                )
    return too_long


def _fixes(config: Config, task: Task) -> str:
    """What else can be done about a prompt that is too long; empty if the configuration does it already."""
    if config.prompt.too_long == "error":
        return 'set prompt.too_long to "drop" or "truncate"'
    if config.prompt.too_long == "drop" and task.num_problems is None:
        return 'set prompt.too_long to "truncate" (of a task without an end none can be dropped)'
    return ""


def say_too_long(config: Config, task: Task, text: PromptText, num_too_long: int) -> list[str]:
    """One line about the prompts that are too long, if there are any."""
    if not num_too_long:
        return []
    what = {
        "error": "the run is refused",
        "drop": "their problems are left out",
        "truncate": "their beginnings are cut off",
    }[config.prompt.too_long]
    return [
        f"{num_too_long} of {task.num_problems or f'the first {NUM_ENDLESS_CHECKED}'} prompts are longer than "
        f'{text.max_prompt_tokens} tokens: {what} (prompt.too_long = "{config.prompt.too_long}")'
    ]


def num_needed(config: Config) -> int:
    """How many problems the run takes, as long as none has to be replaced."""
    return config.num_steps * config.rollout.groups_per_step


def _check_epochs(config: Config, stream: ProblemStream) -> None:
    epochs, per_step = config.task.epochs, config.rollout.groups_per_step
    if not epochs:
        return
    if stream.num_problems is None:
        raise UserError(f"task.epochs={epochs}: this task has no end, and so no epochs: leave it at 0")
    needed = stream.epochs_after(num_needed(config))
    if needed > epochs:
        num_steps = int(config.num_steps * epochs / needed)
        while num_steps and stream.epochs_after(num_steps * per_step) > epochs:
            num_steps -= 1
        fix = f"use num_steps={num_steps}" if num_steps else "lower rollout.groups_per_step"
        raise UserError(
            f"num_steps={config.num_steps} with rollout.groups_per_step={per_step} goes through the {stream.num_problems} "
            f"problems {needed:.2f} times, and task.epochs={epochs}: {fix}, or raise task.epochs"
        )
