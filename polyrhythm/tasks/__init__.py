"""What to learn: a task gives problems by index and may name the reward function that scores their completions.

Flow: `make_task(config.task)` builds and checks a task, `ProblemStream` puts its problems into the run's order, and the
conductor takes `groups_per_step` of them at a time. Nothing here imports torch.
"""

from polyrhythm.tasks.registry import TASKS, make_task
from polyrhythm.tasks.stream import ProblemStream
from polyrhythm.tasks.task import Task

__all__ = ["TASKS", "ProblemStream", "Task", "make_task"]
