"""What to learn: a task gives problems by index and may name the reward function that scores their completions.

Flow: `make_task(config.task, config.prompt)` builds a task, whose problems are checked and have prompts in the form that the
model is to see; `choose_problems` says which a run trains on, as a `ProblemStream` in the run's order, of which the conductor
takes `groups_per_step` at a time; `PromptText` makes token ids of their prompts. Nothing here imports torch.
"""

from polyrhythm.tasks.encoding import PromptText
from polyrhythm.tasks.problems import (
    RunProblems,
    choose_problems,
    find_too_long,
    num_needed,
    open_problems,
    problems_to_check,
    say_too_long,
)
from polyrhythm.tasks.registry import TASKS, make_task
from polyrhythm.tasks.stream import ProblemStream
from polyrhythm.tasks.task import Task

__all__ = [
    "TASKS", "ProblemStream", "PromptText", "RunProblems", "Task", "choose_problems", "find_too_long", "make_task", "num_needed",
    "open_problems", "problems_to_check", "say_too_long",
]  # fmt: skip
