"""Tasks by name: a built-in one, or `module:Class` from the working directory or the Python path."""

import inspect

from polyrhythm.config import PromptConfig, TaskConfig, explain_value
from polyrhythm.errors import UserError
from polyrhythm.tasks.checked import CheckedTask
from polyrhythm.tasks.task import Task
from polyrhythm.user_code import call_with_options, find_kind

TASKS = {
    "addition": "polyrhythm.tasks.addition:Addition",
    "dataset": "polyrhythm.tasks.dataset:DatasetTask",
    "reasoning_gym": "polyrhythm.tasks.reasoning_gym:ReasoningGym",
}


def make_task(config: TaskConfig, prompt: PromptConfig | None = None) -> CheckedTask:
    """Build the task, with prompts in the form asked for; every mistake in its name, options or problems is a `UserError`."""
    task_class = _find_class(config.name)
    try:
        task = call_with_options("task.options", task_class, config.options, f"task {config.name!r}")
    except UserError:
        raise
    # A task of the user's may raise anything.
    except Exception as error:
        raise UserError(
            f"task.name={config.name!r} cannot be made with task.options={config.options!r}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(task, Task):
        raise UserError(
            f"task.name={config.name!r} is not a task: it needs problem(), num_problems, reward, stop and correct_above"
        )
    if task.num_problems is not None and task.num_problems < 1:
        raise UserError(f"task.name={config.name!r} has no problems with task.options={config.options!r}")
    return CheckedTask(task, config.name, prompt or PromptConfig())


def _find_class(name: str) -> type:
    if renamed := explain_value("task.name", name):
        raise UserError(renamed)
    found = find_kind("task.name", name, TASKS, "task")
    if not inspect.isclass(found):
        raise UserError(f"task.name={name!r} is not a class: name the class of a task as module:Class")
    return found
