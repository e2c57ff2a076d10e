"""What can be checked before any process starts: the task, what its rewards need, and that every prompt fits."""

from pathlib import Path

from polyrhythm.algorithms.losses import check_loss
from polyrhythm.config import Config
from polyrhythm.errors import UserError
from polyrhythm.kernels.switch import kernels_off
from polyrhythm.observe.loggers import find_loggers
from polyrhythm.rewards.checks import check_columns, import_in_worker
from polyrhythm.rewards.functions import worker_setup
from polyrhythm.tasks import ProblemStream, make_task
from polyrhythm.tokenizer import Tokenizer

NUM_ENDLESS_CHECKED = 64
WITHOUT_OPTIONS = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "inverse_sqrt")
"""Schedules that need none."""


def check_run(config: Config, model_dir: Path | None) -> None:
    """Raise UserError, naming key, value and fix, for what would fail later. Prompts are checked if there is a model."""
    kernels_off()  # a switch that means nothing is refused here, not in every process
    check_loss(config.algorithm.loss)
    find_loggers(config.observe.loggers)
    check_training(config)
    task = make_task(config.task)
    signatures = import_in_worker(worker_setup(config.reward, task.reward))
    problems = ProblemStream(task, config.seed).take(0, task.num_problems or NUM_ENDLESS_CHECKED)
    for problem in problems:
        check_columns(signatures, problem)
    if model_dir is None:
        return
    tokenizer = Tokenizer(model_dir)
    limit = config.engine.context_length or tokenizer.context_length
    if config.engine.context_length > tokenizer.context_length:
        raise UserError(f"engine.context_length={config.engine.context_length} is more than the "
                        f"{tokenizer.context_length} tokens of model={config.model!r}: lower it")  # fmt: skip
    or_longer = ", or raise engine.context_length" if limit < tokenizer.context_length else ""
    for problem in problems:
        num_tokens = len(tokenizer.encode(problem.prompt))
        if num_tokens + config.rollout.max_tokens > limit:
            raise UserError(
                f"problem {problem.index} of task {config.task.name!r} has a prompt of {num_tokens} tokens; with "
                f"rollout.max_tokens={config.rollout.max_tokens} that is longer than the context of {limit} tokens: "
                f"shorten the prompt or lower rollout.max_tokens{or_longer}"
            )


def check_training(config: Config) -> None:
    """Raise what making the optimizer and the schedule would; what is usual is known to work without importing torch."""
    training = config.training
    has_usual_rate = training.schedule in WITHOUT_OPTIONS and not training.schedule_options
    if training.optimizer == "adamw" and not training.optimizer_options and has_usual_rate:
        return
    from polyrhythm.training.optimizer import try_optimizer

    try_optimizer(training, config.num_steps)
