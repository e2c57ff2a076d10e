"""What can be checked before any process starts: devices, the task, what its rewards need, and that every prompt fits."""

import sys
from collections.abc import Iterator
from pathlib import Path

from polyrhythm.algorithms.losses import check_loss
from polyrhythm.cluster.ray.checks import check_ray
from polyrhythm.config import Config
from polyrhythm.devices.plan import describe_plan, plan_devices
from polyrhythm.engine.vllm.launching import check_vllm
from polyrhythm.kernels.switch import kernels_off
from polyrhythm.observe.loggers import find_loggers
from polyrhythm.rewards.checks import check_columns, import_in_worker
from polyrhythm.rewards.functions import worker_setup
from polyrhythm.tasks import PromptText, choose_problems, find_too_long, make_task, problems_to_check, say_too_long
from polyrhythm.tokenizer import Tokenizer
from polyrhythm.types import Problem

WITHOUT_OPTIONS = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "inverse_sqrt")
"""Schedules that need none."""


def check_run(config: Config, model_dir: Path | None) -> None:
    """Raise UserError, naming key, value and fix, for what would fail later. Prompts are checked if there is a model.

    What becomes of prompts that are too long is said here, once.
    """
    kernels_off()  # a switch that means nothing is refused here, not in every process
    check_loss(config.algorithm.loss)
    find_loggers(config.observe.loggers)
    if config.engine.kind == "vllm" and not config.engine.url and config.cluster.kind == "local":
        check_vllm(config.engine)
    check_training(config)
    describe_plan(plan_devices(config), config, model_dir)
    if config.cluster.kind == "ray":
        check_ray(config)
    task = make_task(config.task, config.prompt)
    signatures = import_in_worker(worker_setup(config.reward, task.reward))

    def checked() -> Iterator[Problem]:
        for problem in problems_to_check(config, task):
            check_columns(signatures, problem)
            yield problem

    if model_dir is None:
        for _ in checked():
            pass
        choose_problems(config, task, [])
        return
    text = PromptText(Tokenizer(model_dir), config)
    too_long = find_too_long(config, task, text, checked())
    choose_problems(config, task, too_long)
    for line in say_too_long(config, task, text, len(too_long)):
        print(line, file=sys.stderr, flush=True)


def check_training(config: Config) -> None:
    """Raise what making the optimizer and the schedule would; what is usual is known to work without importing torch."""
    training = config.training
    has_usual_rate = training.schedule in WITHOUT_OPTIONS and not training.schedule_options
    if training.optimizer == "adamw" and not training.optimizer_options and has_usual_rate:
        return
    from polyrhythm.training.optimizer import try_optimizer

    try_optimizer(training, config.num_steps)
