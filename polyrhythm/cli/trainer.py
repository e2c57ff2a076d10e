"""`polyrhythm trainer`: one trainer rank of a run, which `polyrhythm train` starts, or which joins it from any machine."""

import argparse
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.errors import LetGo, UserError
from polyrhythm.runs.joining import join_run

if TYPE_CHECKING:
    from polyrhythm.cluster.run_folder import RunFolder
    from polyrhythm.config import Config
    from polyrhythm.weights.store import WeightStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, dest="run_dir", help="the run folder")
    parser.add_argument("--join", metavar="URL", help="train in the run whose conductor listens there")
    parser.add_argument("--token-file", type=Path, help="with --join: the run's tokens.json, or a copy of it")
    parser.add_argument(
        "--rank", type=int, help="which of the run's training.num_ranks it is (with --join: RANK, else a free one)"
    )
    parser.add_argument("--model", help="with --join: where the run's model is on this machine")
    parser.add_argument(
        "--download", action="store_true", help="with --join: compare weights over HTTP, use no shared folder"
    )
    parser.add_argument("--threads", type=int, default=0, help="with --join: CPU threads; 0 takes all cores")


def run(parsed: argparse.Namespace) -> int:
    if (parsed.run_dir is None) == (parsed.join is None):
        raise UserError("a rank needs one of --run RUN and --join URL")
    return _joining_rank(parsed) if parsed.join else _own_rank(parsed)


def _own_rank(parsed: argparse.Namespace) -> int:
    rank = parsed.rank or 0
    folder, config = join_run(parsed)
    if rank < 0 or (rank >= config.training.num_ranks and not config.training.elastic):
        raise UserError(f"--rank {rank}: from 0 to {config.training.num_ranks - 1}, see training.num_ranks")
    return _train(folder, config, rank)


def _joining_rank(parsed: argparse.Namespace) -> int:
    from polyrhythm.cluster.local_processes import leave_with_parent
    from polyrhythm.cluster.member import joining_rank

    leave_with_parent()
    if not parsed.token_file:
        raise UserError("--join URL goes with --token-file FILE, a copy of the run's tokens.json")
    if parsed.threads < 0:
        raise UserError(f"--threads {parsed.threads}: at least 1, or 0 for all cores")
    joining = joining_rank(
        parsed.join.rstrip("/"), token_file=parsed.token_file, rank=parsed.rank, model=parsed.model,
        num_threads=parsed.threads, always_download=parsed.download, environment=os.environ,
    )  # fmt: skip
    with joining as joined:
        return _train(joined.folder, joined.config, joined.rank, joined.store)


def _train(folder: "RunFolder", config: "Config", rank: int, store: "WeightStore | None" = None) -> int:
    from polyrhythm.cluster.signals import signals_handled
    from polyrhythm.interrupts import interrupts
    from polyrhythm.kernels.spinning import SpinControl
    from polyrhythm.loop import run_trainer

    with signals_handled(interrupts.handle, signal.SIGTERM, signal.SIGINT), SpinControl():
        try:
            run_trainer(folder, config, rank, store)
        except LetGo as goodbye:
            print(goodbye)
    return 0
