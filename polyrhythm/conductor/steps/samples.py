"""Some completions of a step as text, for `samples.jsonl` and the live view. Pure."""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from polyrhythm.conductor.steps.step import Step
from polyrhythm.types import Group, Problem, Rollout, Trace


def step_samples(step: Step, num_samples: int, text: Callable[[Trace], str]) -> list[dict[str, Any]]:
    """The first rollout of every group, then the second of every group, and so on, until there are as many as asked for."""
    groups = [group for _, group in sorted(step.finished.items())]
    rounds = zip(*(group.rollouts for group in groups), strict=True)
    in_turn = ((group, rollout) for round_ in rounds for group, rollout in zip(groups, round_, strict=True))
    return [
        _sample(step.problems[group.position], group, rollout, text)
        | {"extra": _of_rollout(step.reward_record.extra.get(group.position, {}), rollout)}
        for group, rollout in islice(in_turn, num_samples)
    ]


def _sample(problem: Problem, group: Group, rollout: Rollout, text: Callable[[Trace], str]) -> dict[str, Any]:
    """One line; `SAMPLE_COLUMNS` in observe/metrics.py says what each column is."""
    return {
        "position": group.position,
        "problem": problem.index,
        "epoch": problem.epoch,
        "rollout": rollout.index,
        "prompt": problem.prompt,
        "columns": problem.columns,
        "completion": text(rollout.trace),
        "reward": rollout.reward,
        "scores": _of_rollout(group.scores, rollout),
        "finish_reason": rollout.trace.finish_reason,
        "prompt_tokens": len(group.prompt_ids),
        "completion_tokens": rollout.trace.num_sampled,
    }


def _of_rollout(columns: Mapping[str, list[Any]], rollout: Rollout) -> dict[str, Any]:
    return {name: values[rollout.index] for name, values in columns.items()}
