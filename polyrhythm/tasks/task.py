"""The protocol that every task keeps."""

from typing import NamedTuple, Protocol, runtime_checkable

from polyrhythm.types import Problem


@runtime_checkable
class Task(Protocol):
    """A source of problems. The keyword arguments of its constructor are `task.options`."""

    @property
    def num_problems(self) -> int | None:
        """How many problems there are; None: any index from 0 on is a problem."""
        ...

    @property
    def reward(self) -> str | None:
        """The task's own reward as `module:function`; None: `reward.functions` must name one.

        It is called as `function(completions, **columns)` with lists of equal length.
        """
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a completion."""
        ...

    @property
    def correct_above(self) -> float | None:
        """A completion with a higher reward is correct; None: the reward does not tell, and the run has no accuracy.

        If the task has a reward of its own, this is about that one: it says nothing once `reward.functions` names others.
        """
        ...

    def problem(self, index: int) -> Problem:
        """The problem of this index: the same one in every process and at every call."""
        ...


class Part(NamedTuple):
    """A stretch of a task's problems, and how much of a run it is."""

    indices: range
    weight: float


@runtime_checkable
class MixedTask(Task, Protocol):
    """A finite task whose problems are of several kinds."""

    @property
    def parts(self) -> list[Part]:
        """Together all problems; none: they are not weighed against one another."""
        ...
