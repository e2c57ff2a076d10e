"""Every metric of a run in one table: what it is called, its unit, what it says, who measures it, and when it is there.

Whoever measures something new adds it here; `python -m polyrhythm.observe.metrics > docs/metrics.md` writes the page for users.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from polyrhythm.observe.activity import Activity, seconds_metric


class Metric(msgspec.Struct, frozen=True):
    """One column of `metrics.jsonl`. `when` is empty for what every step has."""

    measured_by: Literal["conductor", "trainer"]
    unit: str
    meaning: str
    when: str = ""


TRAINED = "`train/tokens` is above 0"
ELASTIC = "`training.elastic`"
RANKS = "`training.num_ranks` is above 1"
SEVERAL = "there are several reward functions, and it applies to a rollout"
KL = f"`algorithm.kl_coef` and {TRAINED}"

METRICS: dict[str, Metric] = {
    "reward/mean": Metric("conductor", "reward", "Mean over all rollouts whose reward did not fail."),
    "reward/std": Metric("conductor", "reward", "Standard deviation over the same rollouts, of all groups together."),
    "reward/accuracy": Metric(
        "conductor",
        "fraction of rollouts",
        "Share of those rollouts that are correct: their reward is above the task's `correct_above`.",
        "the task says what is correct",
    ),
    "reward/excluded": Metric(
        "conductor",
        "rollouts",
        "Rollouts whose reward failed; they are not trained on, and `logs/conductor.log` says why they failed.",
    ),
    "reward/no_signal": Metric(
        "conductor",
        "rollouts",
        "Rollouts for which every reward function returned None: none applies, and they are not trained on.",
    ),
    "reward/*/mean": Metric(
        "conductor",
        "reward",
        "Mean of one function, named by it, before weighting, over the rollouts that it applies to.",
        SEVERAL,
    ),
    "reward/*/std": Metric("conductor", "reward", "Standard deviation over the same rollouts.", SEVERAL),
    "reward_extra/*": Metric(
        "conductor",
        "as the function says",
        "Mean of what reward functions log with `log_metric`, or return beside `score`; at most 100 names.",
        "a function logs it",
    ),
    "completion/tokens_mean": Metric("conductor", "tokens", "Mean length of the completions."),
    "completion/tokens_min": Metric("conductor", "tokens", "Length of the shortest completion."),
    "completion/tokens_max": Metric("conductor", "tokens", "Length of the longest completion."),
    "completion/truncated_fraction": Metric(
        "conductor", "fraction of rollouts", "Share of completions that were cut off at `rollout.max_tokens`."
    ),
    "data/epoch": Metric(
        "conductor",
        "passes over the problems",
        "How often the run has gone through its problems by the end of this step; 1.5 is one and a half times.",
        "the task has a finite number of problems",
    ),
    "tokens/total_generated": Metric(
        "conductor", "tokens", "Completion tokens of all steps so far; goes on after `--resume`."
    ),
    "tokens/total_trained": Metric(
        "conductor", "tokens", "Sum of `train/tokens` over all steps so far; goes on after `--resume`."
    ),
    "groups/zero_variance": Metric(
        "conductor",
        "groups",
        "Groups whose rollouts all have the same reward: they say nothing about which completion is better.",
    ),
    "groups/skipped": Metric(
        "trainer", "groups", "Groups that were not trained on because all their advantages are zero."
    ),
    "groups/replaced": Metric(
        "conductor", "groups", "Problems that no engine could answer and that were replaced by the next ones."
    ),
    "train/loss": Metric(
        "trainer",
        "loss",
        "The number that is minimised: the summed loss of the step divided by the divisor of `algorithm.aggregation`. On-policy it is "
        "close to zero and does not fall as the policy improves; look at the reward.",
    ),
    "train/grad_norm": Metric(
        "trainer", "norm", "Norm of the whole gradient before clipping, of the step's last update."
    ),
    "train/learning_rate": Metric("trainer", "rate", "Learning rate of the step's last update."),
    "train/entropy": Metric(
        "trainer", "nats per token", "Mean entropy of the policy's next-token distribution.", TRAINED
    ),
    "train/tokens": Metric("trainer", "tokens", "Completion tokens that were trained on."),
    "train/row_tokens": Metric("trainer", "tokens", "Tokens that went through the model for that, prompts included."),
    "train/clip_fraction": Metric(
        "trainer",
        "fraction of tokens",
        "Share of tokens whose ratio is beyond `algorithm.clip_low` or `algorithm.clip_high`.",
        f'{TRAINED} and `algorithm.loss = "clipped"`',
    ),
    "train/ratio_mean": Metric(
        "trainer", "ratio", "Mean probability ratio of the policy to the policy at the start of the step.", TRAINED
    ),
    "train/ratio_abs_gap_max": Metric(
        "trainer", "ratio", "Largest distance of that ratio from 1; exactly 0 with one update per step.", TRAINED
    ),
    "kl/k1": Metric(
        "trainer", "nats per token", "Mean log-ratio of the policy to the reference; unbiased, can be negative.", KL
    ),
    "kl/k3": Metric(
        "trainer", "nats per token", "Estimate of the KL divergence to the reference that is never negative.", KL
    ),
    "mismatch/logprob_abs_mean": Metric(
        "trainer",
        "nats",
        "Mean distance between what engine and trainer compute as the log-probability of a token, both with the weights that drew it.",
        TRAINED,
    ),
    "mismatch/logprob_abs_max": Metric("trainer", "nats", "Largest such distance.", TRAINED),
    "mismatch/k1": Metric("trainer", "nats per token", "KL divergence of engine and trainer: mean log-ratio.", TRAINED),
    "mismatch/k3": Metric("trainer", "nats per token", "The same, by the estimator that is never negative.", TRAINED),
    "onpolicy/violations": Metric(
        "conductor", "rollouts", "Completions of another policy version: refused, generated again, and counted here."
    ),
    "ledger/duplicates": Metric("conductor", "rollouts", "Completions that came a second time and were dropped."),
    "ledger/refused": Metric(
        "conductor", "rollouts", "Completions that were malformed, for example without log-probabilities."
    ),
    "dispatch/retries": Metric("conductor", "requests", "Requests that failed and were sent again."),
    "dispatch/hedged": Metric(
        "conductor", "requests", "Requests that were also sent to an idle engine, see `conductor.hedge_groups`."
    ),
    "engines/serving": Metric("conductor", "engines", "Engines that served this step at its end."),
    "engines/received": Metric(
        "conductor",
        "engines",
        "Engines among them that were sent its weights by a broadcast; the others read the store.",
    ),
    "engines/lost": Metric("conductor", "engines", "Engines that were lost during this step."),
    "cores/changes": Metric(
        "conductor",
        "changes",
        "How often CPU threads moved between engines and trainer.",
        "cores follow demand, see `cluster.cores`",
    ),
    "ranks/num": Metric("trainer", "ranks", "Trainer processes.", RANKS),
    "ranks/largest_share": Metric(
        "trainer", "fraction of row tokens", "What the busiest rank had of the work; with two ranks 0.5 is even.", RANKS
    ),
    "ranks/lost": Metric("conductor", "ranks", "Elastic ranks that were lost in the step.", ELASTIC),
    "ranks/groups_again": Metric(
        "conductor", "groups", "Groups that a lost rank had received and that were trained again by others.", ELASTIC
    ),
    "generate/tokens_per_s": Metric(
        "conductor", "tokens per second", "Completion tokens of the step over `generate/last_group_s`."
    ),
    "generate/first_group_s": Metric(
        "conductor", "seconds", "From the moment engines could begin to the first finished group."
    ),
    "generate/last_group_s": Metric(
        "conductor", "seconds", "From the same moment to the last finished group, rewards included."
    ),
    "time/step_s": Metric(
        "conductor", "seconds", "The whole step: from the publication of its weights to that of the next ones."
    ),
    "time/load_s": Metric("conductor", "seconds", "Until the engines had loaded the step's weights."),
    "time/engines_idle_s": Metric(
        "conductor",
        "seconds",
        "No engine had anything to generate: from the last group of the step before to the first request of this one.",
        "there was a step before since the start",
    ),
    "time/trainer_load_s": Metric(
        "trainer", "seconds", "The trainer waited for the engines to load the step's weights."
    ),
    "time/trainer_wait_s": Metric(
        "trainer", "seconds", "The trainer waited for groups; with several ranks the mean of them."
    ),
    "time/trainer_forward_backward_s": Metric("trainer", "seconds", "Forward and backward passes."),
    "time/trainer_update_s": Metric("trainer", "seconds", "Clipping and the optimizer."),
    "time/trainer_publish_s": Metric("trainer", "seconds", "Writing the new weights for the engines."),
    "time/trainer_verify_s": Metric(
        "trainer", "seconds", "Proving that the weights are those that another rank has published.", ELASTIC
    ),
    "time/trainer_agree_s": Metric(
        "trainer", "seconds", "Waiting for the slowest rank before gradients are added up.", RANKS
    ),
    "time/trainer_reduce_s": Metric("trainer", "seconds", "Adding up gradients over the ranks.", RANKS),
    "time/trainer_commit_s": Metric(
        "trainer", "seconds", "Committing the step before this one.", "there was a step before since the start"
    ),
    "time/trainer_checkpoint_s": Metric(
        "trainer",
        "seconds",
        "Copying weights and optimizer for the checkpoint after the step before this one, and waiting for an earlier one "
        "that is still being written.",
        "there was a checkpoint",
    ),
    "time/trainer_start_s": Metric(
        "trainer", "seconds", "Loading the model and publishing it.", "first step after a start"
    ),
    "loss/*": Metric(
        "trainer",
        "as the loss says",
        "What a loss measures of its own, under names that begin with `loss/`.",
        "`algorithm.loss` measures something",
    ),
}

SAMPLE_COLUMNS: dict[str, str] = {
    "step": "The step, as in `metrics.jsonl`.",
    "policy_version": "The weights that generated it, as in `metrics.jsonl`.",
    "position": "Place of the problem in the step, from 0.",
    "problem": "Index of the problem in its task.",
    "epoch": "How often the run had gone through all problems before.",
    "rollout": "Which rollout of the problem's group, from 0.",
    "prompt": "Text or chat messages, as the task gives them.",
    "columns": "The other columns of the problem: what the reward function is given by name.",
    "completion": "What the model wrote, as text.",
    "reward": "Its reward; null if a function failed or none applies.",
    "scores": "What each reward function returned for it, by name and before weighting; null if it failed or does not apply.",
    "extra": "What reward functions log with `log_extra`, or return beside `score`, by name.",
    "finish_reason": "`stop`, or `length` if it was cut off at `rollout.max_tokens`.",
    "prompt_tokens": "Length of the prompt.",
    "completion_tokens": "Length of the completion.",
}

ALWAYS_TIMED = (Activity.LOAD, Activity.WAIT, Activity.FORWARD_BACKWARD, Activity.UPDATE, Activity.PUBLISH)


def is_known(name: str) -> bool:
    """Whether the table has a metric, by its name or as one of many (`loss/*`, `reward/*/mean`)."""
    return name in METRICS or any(fnmatchcase(name, pattern) for pattern in METRICS if "*" in pattern)


def in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics in the order of the table, so that every line of `metrics.jsonl` reads alike; others come last."""
    return {name: metrics[name] for name in METRICS if name in metrics} | dict(metrics)


def trainer_times(seconds: Mapping[Activity, float]) -> dict[str, float]:
    """Seconds per activity of the trainer as metrics; what every step does has a time even if that is nothing."""
    return {seconds_metric(activity): s for activity, s in {**dict.fromkeys(ALWAYS_TIMED, 0.0), **seconds}.items()}


def page() -> str:
    """`docs/metrics.md`."""
    return "\n".join(
        [
            "# What a run writes",
            "",
            "<!-- Written by `python -m polyrhythm.observe.metrics > docs/metrics.md`; edit the table there, not this page. -->",
            "",
            "## metrics.jsonl",
            "",
            "One JSON object per finished step: `step`, counted from 1 as on the screen, `policy_version` of the weights that generated its "
            "rollouts (`step` - 1), `time` (seconds since 1970), and these numbers. A number that is not finite is null.",
            "",
            *_table(("name", "unit", "meaning", "measured by", "there if"), (
                (f"`{name}`", metric.unit, metric.meaning, metric.measured_by, metric.when or "always")
                for name, metric in METRICS.items()
            )),
            "",
            "## samples.jsonl",
            "",
            "As many completions of every step as `observe.samples_per_step` says: one of each group, then a second one of each, and so on.",
            "",
            *_table(("column", "meaning"), ((f"`{name}`", meaning) for name, meaning in SAMPLE_COLUMNS.items())),
        ]
    )  # fmt: skip


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]


if __name__ == "__main__":
    print(page())
