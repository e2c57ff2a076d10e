"""The learning rate of every update: a schedule of transformers, as a pure function of the number of updates made.

transformers begins a warm-up at zero, so that its first update changes nothing. Here every update of the warm-up has the
rate that transformers gives to the one after it, (u + 1) / W of the peak; from the end of the warm-up on the rates are
those of transformers.
"""

from collections.abc import Callable

import torch
from transformers import get_scheduler

from polyrhythm.config import TrainingConfig
from polyrhythm.errors import UserError

LearningRates = Callable[[int], float]
"""From the number of updates made so far to the learning rate of the next one."""

COUNTED_IN_STEPS = ("num_decay_steps", "num_stable_steps", "timescale")
STARTS_ABOVE_ZERO = "cosine_warmup_with_min_lr"
"""The one schedule of transformers that does not waste the first update."""


def learning_rates(config: TrainingConfig, num_steps: int) -> LearningRates:
    """The schedule of a run of `num_steps`; options that do not fit it are a UserError."""
    num_warm = config.warmup_steps * config.updates_per_step
    num_planned = num_steps * config.updates_per_step
    factor = _factor(config, num_warm, num_planned)
    lead = 0 if config.schedule == STARTS_ABOVE_ZERO else 1

    def learning_rate(num_updates: int) -> float:
        return config.learning_rate * factor(num_updates + lead if num_updates < num_warm else num_updates)

    try:
        for num_updates in {0, num_warm, num_planned - 1}:
            learning_rate(num_updates)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise _refused(config, error) from None
    return learning_rate


def _factor(config: TrainingConfig, num_warm: int, num_planned: int) -> Callable[[int], float]:
    # transformers' constant schedule has no warm-up; ours has, if there are warmup_steps.
    name = "constant_with_warmup" if config.schedule == "constant" else config.schedule
    if name == "constant_with_warmup" and config.schedule_options:
        raise UserError(f"training.schedule={config.schedule!r} has no options: remove training.schedule_options")
    options = {
        name: value * config.updates_per_step if name in COUNTED_IN_STEPS else value
        for name, value in config.schedule_options.items()
    }
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)  # only its rate is asked for
    try:
        scheduler = get_scheduler(name, stand_in, num_warm, num_planned, options)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise _refused(config, error) from None
    return scheduler.lr_lambdas[0]  # pyright: ignore


def _refused(config: TrainingConfig, error: Exception) -> UserError:
    said = str(error).splitlines()[0].removeprefix("get_").replace("through the `lr_scheduler_kwargs`", "").strip()
    return UserError(
        f"training.schedule={config.schedule!r} with training.schedule_options={config.schedule_options} and "
        f"training.learning_rate={config.learning_rate} is not possible: {said}"
    )
