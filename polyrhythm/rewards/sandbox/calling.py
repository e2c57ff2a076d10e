"""How a reward function is called: by TRL's convention, or by verl's if its signature is that of a `compute_score`."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from polyrhythm.rewards.sandbox.failure import failure_of
from polyrhythm.rewards.sandbox.frames import RewardFailure, RewardFunction, RewardSignature, TrainingState
from polyrhythm.rewards.sandbox.notes import BadResult, Notes

OFFERED = ("prompts", "completions", "completion_ids", "finish_reason", "trainer_state", "log_extra", "log_metric")
OFFERED_PER_COMPLETION = ("solution_str", "extra_info")
GROUND_TRUTHS = ("answer", "solution", "label")
"""Columns that hold what verl calls `ground_truth`, if there is none of that name."""
MAX_SHOWN_CHARS = 80


class Function:
    """A reward function, with what its signature says about how it wants to be called.

    A function that has a parameter `solution_str` is verl's: it gets one completion per call, and no lists.
    """

    def __init__(self, reward: RewardFunction, function: Callable[..., Any]):
        self.name, self.weight = reward.name, reward.weight
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        self._names = {parameter.name for parameter in parameters}
        self.per_completion = "solution_str" in self._names
        self.groups_per_call = max(1, int(getattr(function, "groups_per_call", 1)))
        self.compares_completions = bool(getattr(function, "compares_completions", False))
        offered = OFFERED_PER_COMPLETION if self.per_completion else OFFERED
        required = [
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            and parameter.name not in offered
        ]
        self.signature = RewardSignature(
            reward.spec, required, self.groups_per_call, self.compares_completions, self.per_completion
        )

    def call(self, columns: dict[str, list[Any]], texts: list[str], state: TrainingState, notes: Notes) -> Any:
        """What the function returns for the completions of the columns, or something to await for it."""
        if self.per_completion:
            row = with_ground_truth({name: values[0] for name, values in columns.items()})
            offered = {"extra_info": None} | row | {"solution_str": texts[0]}
            return self._function(**{name: value for name, value in offered.items() if name in self._names})
        offered = {**columns, "trainer_state": state, "log_extra": notes.log_extra, "log_metric": notes.log_metric}
        return self._function(
            **{name: value for name, value in offered.items() if self._takes_all or name in self._names}
        )

    def values(self, result: Any, num_completions: int, notes: Notes) -> list[float | RewardFailure | None]:
        """The value of each completion in what the function returned; BadResult if it is no list of them."""
        if self.per_completion:
            return [self._value(0, result, notes)]
        result = result.tolist() if hasattr(result, "tolist") else result  # numpy arrays, tensors, series
        wanted = f"{self.name} must return a list with a number, or None, for each of {num_completions} completions"
        if not isinstance(result, list | tuple):
            raise BadResult(f"{wanted}; it returned {_shown(result)}")
        if len(result) != num_completions:
            raise BadResult(f"{wanted}; it returned {len(result)} values")
        return [self._value(row, item, notes) for row, item in enumerate(result)]

    def _value(self, row: int, item: Any, notes: Notes) -> float | RewardFailure | None:
        try:
            if isinstance(item, Mapping):
                if "score" not in item:
                    raise BadResult(f"{self.name} returned a dict without the key 'score': {_shown(item)}")
                notes.log_details(row, {key: value for key, value in item.items() if key != "score"})
                item = item["score"]
            if item is None:
                return None
            number = math.nan if isinstance(item, str) else float(item)
            if not math.isfinite(number):
                raise BadResult(f"{self.name} returned {_shown(item)}, which is not a finite number")
            return number
        except Exception as error:  # float() of what the user's code returned may raise anything
            return failure_of(error)


def with_ground_truth(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns of a problem with verl's `ground_truth` among them, if they hold one under another name."""
    model = columns.get("reward_model")
    if "ground_truth" in columns:
        return columns
    if isinstance(model, Mapping) and "ground_truth" in model:
        return columns | {"ground_truth": model["ground_truth"]}
    named = next((name for name in GROUND_TRUTHS if name in columns), None)
    return columns if named is None else columns | {"ground_truth": columns[named]}


def _shown(result: Any) -> str:
    text = repr(result)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
