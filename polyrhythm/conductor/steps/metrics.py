"""What a step looked like from the conductor's side: one flat dict of numbers. Pure."""

from statistics import fmean, pstdev

from polyrhythm.conductor.steps.step import Step
from polyrhythm.types import Group


def step_metrics(step: Step, now_s: float, *, epoch: float | None, correct_above: float | None) -> dict[str, float]:
    """The metrics of a step whose groups are all in.

    A task without an end has no epochs, one that does not say what is correct no accuracy.
    """
    groups = list(step.finished.values())
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    lengths = [rollout.trace.num_sampled for rollout in rollouts]
    dispatched_at_s = step.dispatched_at_s if step.dispatched_at_s is not None else step.opened_at_s
    # Groups that an earlier process of the run had finished were there before the engines.
    first_group_s = max(0.0, min(step.finished_at_s.values()) - dispatched_at_s)
    last_group_s = max(0.0, max(step.finished_at_s.values()) - dispatched_at_s)
    return {
        "reward/mean": fmean(rewards) if rewards else 0.0,
        "reward/std": pstdev(rewards) if rewards else 0.0,
        **_accuracy(rewards, correct_above),
        "reward/excluded": (num_failed := sum(len(group.failed) for group in groups)),
        "reward/no_signal": len(rollouts) - len(rewards) - num_failed,
        **_by_function(groups),
        **{f"reward_extra/{name}": fmean(numbers) for name, numbers in step.reward_record.metrics.items()},
        "groups/zero_variance": sum(
            len({rollout.reward for rollout in group.rollouts if rollout.reward is not None}) < 2 for group in groups
        ),
        "completion/tokens_mean": fmean(lengths),
        "completion/tokens_min": min(lengths),
        "completion/tokens_max": max(lengths),
        "completion/truncated_fraction": fmean(rollout.trace.finish_reason == "length" for rollout in rollouts),
        **({} if epoch is None else {"data/epoch": epoch}),
        "generate/tokens_per_s": sum(lengths) / last_group_s if last_group_s > 0 else 0.0,
        "generate/first_group_s": first_group_s,
        "generate/last_group_s": last_group_s,
        "time/load_s": dispatched_at_s - step.opened_at_s,
        **_idle(step.last_group_before_s, dispatched_at_s),
        "time/step_s": now_s - step.opened_at_s,
        "onpolicy/violations": step.ledger.num_violations,
        "ledger/duplicates": step.ledger.num_duplicates,
        "ledger/refused": step.ledger.num_refused,
        "dispatch/retries": step.num_retries,
        "dispatch/hedged": step.num_hedged,
        "groups/replaced": step.num_replaced,
    }


def _idle(last_group_before_s: float | None, dispatched_at_s: float) -> dict[str, float]:
    """How long no engine had anything to generate: from the last group of the step before to the first request."""
    return {} if last_group_before_s is None else {"time/engines_idle_s": dispatched_at_s - last_group_before_s}


def _accuracy(rewards: list[float], correct_above: float | None) -> dict[str, float]:
    if not rewards or correct_above is None:
        return {}
    return {"reward/accuracy": fmean(reward > correct_above for reward in rewards)}


def _by_function(groups: list[Group]) -> dict[str, float]:
    """Mean and deviation of each reward function, where it applies; of a single one `reward/mean` says the same."""
    metrics = {}
    for name in dict.fromkeys(name for group in groups for name in group.scores if len(group.scores) > 1):
        scores = [score for group in groups for score in group.scores.get(name, []) if score is not None]
        if scores:
            metrics |= {f"reward/{name}/mean": fmean(scores), f"reward/{name}/std": pstdev(scores)}
    return metrics
