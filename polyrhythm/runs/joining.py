"""What the processes of a run have in common: they are told its folder, and servers serve until a signal comes."""

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


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, dest="run_dir", required=True, help="the run folder")


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
