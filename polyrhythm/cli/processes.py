"""`polyrhythm conductor` and `polyrhythm trainer`: processes of a run, which `polyrhythm train` starts."""

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrhythm.errors import UserError

if TYPE_CHECKING:
    from polyrhythm.cluster.run_folder import RunFolder
    from polyrhythm.config import Config


def add_conductor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, dest="run_dir", required=True, help="the run folder")


def add_trainer_arguments(parser: argparse.ArgumentParser) -> None:
    add_conductor_arguments(parser)
    parser.add_argument("--rank", type=int, default=0, help="which of the run's training.num_ranks it is")


def run_conductor(parsed: argparse.Namespace) -> int:
    from polyrhythm.chaos.rewards import reward_pool
    from polyrhythm.cluster.cores import cores_follow_demand, num_cores, plan_threads
    from polyrhythm.conductor import service

    run, config = join_run(parsed)
    return serve(
        service.run_conductor(
            config, run.path, run.model_dir, run.store_root, run.credentials(), port=config.conductor.port,
            ready=lambda url: run.announce("conductor", url),
            cores=plan_threads(config, num_cores()) if cores_follow_demand(config) else None,
            make_rewards=reward_pool(run.path),
        )
    )  # fmt: skip


def run_trainer(parsed: argparse.Namespace) -> int:
    from polyrhythm import train
    from polyrhythm.cluster.signals import signals_handled

    run, config = join_run(parsed)
    if not 0 <= parsed.rank < config.training.num_ranks:
        raise UserError(f"--rank {parsed.rank}: from 0 to {config.training.num_ranks - 1}, see training.num_ranks")
    with signals_handled(signal.default_int_handler, signal.SIGTERM):
        train.run_trainer(run, config, parsed.rank)
    return 0


def join_run(parsed: argparse.Namespace) -> "tuple[RunFolder, Config]":
    from polyrhythm.cluster.local_processes import leave_with_parent
    from polyrhythm.cluster.run_folder import RunFolder

    leave_with_parent()
    run = RunFolder(parsed.run_dir)
    try:
        return run, run.config()
    except OSError:
        raise UserError(f"--run {parsed.run_dir} is not a run folder: it has no config.json") from None


def serve(server: Coroutine[Any, Any, None]) -> int:
    """Run a server until SIGTERM or SIGINT cancels it."""

    async def serve() -> None:
        task = asyncio.ensure_future(server)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(serve())
    return 0
