"""`polyrhythm trainer`: one trainer rank of a run, which `polyrhythm train` starts."""

import argparse
import signal

from polyrhythm.errors import UserError
from polyrhythm.runs.joining import add_run_argument, join_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--rank", type=int, default=0, help="which of the run's training.num_ranks it is")


def run(parsed: argparse.Namespace) -> int:
    from polyrhythm.cluster.signals import signals_handled
    from polyrhythm.interrupts import interrupts
    from polyrhythm.kernels.spinning import SpinControl
    from polyrhythm.loop import run_trainer

    folder, config = join_run(parsed)
    if not 0 <= parsed.rank < config.training.num_ranks:
        raise UserError(f"--rank {parsed.rank}: from 0 to {config.training.num_ranks - 1}, see training.num_ranks")
    with signals_handled(interrupts.handle, signal.SIGTERM, signal.SIGINT), SpinControl():
        run_trainer(folder, config, parsed.rank)
    return 0
