"""A task as the rest of the system uses it: its problems are checked, and in the form that `[prompt]` asks for."""

from polyrhythm.config import PromptConfig
from polyrhythm.errors import UserError
from polyrhythm.tasks.prompts import check_prompt, form_prompt
from polyrhythm.tasks.task import MixedTask, Part, Task
from polyrhythm.types import Problem


class CheckedTask:
    """Around any task. What it raises becomes a UserError that names the problem."""

    def __init__(self, task: Task, name: str, prompt: PromptConfig) -> None:
        self.task = task
        self._name = name
        self._prompt = prompt
        self.num_problems = task.num_problems
        self.reward = task.reward
        self.stop = task.stop
        self.correct_above = task.correct_above
        self.parts: list[Part] = task.parts if isinstance(task, MixedTask) else []

    def problem(self, index: int) -> Problem:
        place = f"problem {index} of task {self._name!r}"
        try:
            problem = self.task.problem(index)
        except UserError:
            raise
        # A task of the user's may raise anything.
        except Exception as error:
            raise UserError(f"{place} cannot be made: {type(error).__name__}: {error}") from error
        if not isinstance(problem, Problem):
            raise UserError(f"{place} is a {type(problem).__name__}: problem() must return a polyrhythm.types.Problem")
        checked = check_prompt(problem.prompt, place)
        if checked != problem.prompt:
            problem = Problem(problem.index, checked, problem.columns, problem.epoch)
        try:
            return form_prompt(problem, self._prompt)
        except UserError as error:
            raise UserError(f"{place}: {error}") from error
