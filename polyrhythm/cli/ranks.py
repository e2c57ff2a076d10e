"""`polyrhythm ranks`: the elastic ranks of a live run as its user sees and changes them."""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from polyrhythm.cluster.asking import ask_for_one_more, status_of
from polyrhythm.cluster.run_folder import RANK, RunFolder
from polyrhythm.errors import UserError
from polyrhythm.observe.status import RankView
from polyrhythm.observe.terminal.text import visible

WIDTH_OF_PIPES = 160
COLUMNS = ("rank", "state", "doing", "for")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=["list", "add", "drain", "remove"], help="drain: after the update it works on"
    )
    parser.add_argument("name", nargs="?", help="the rank to drain or remove")
    parser.add_argument("--run", type=Path, dest="run_dir", required=True, help="the run folder")


def run(parsed: argparse.Namespace) -> int:
    folder = RunFolder(parsed.run_dir)
    if (parsed.name is None) != (parsed.action in ("list", "add")):
        raise UserError("`ranks drain` and `ranks remove` need the name of a rank, `list` and `add` need none")
    if parsed.action == "list":
        width = None if sys.stdout.isatty() else WIDTH_OF_PIPES
        list_ranks(folder, Console(highlight=False, markup=False, width=width))
    elif parsed.action == "add":
        print(f"{add_rank(folder)} is being started")
    elif parsed.action == "drain":
        drain_rank(folder, parsed.name)
        print(f"{parsed.name} leaves after the update that is being made")
    else:
        remove_rank(folder, parsed.name)
        print(f"{parsed.name} has left the run: the others train on what it had")
    return 0


def list_ranks(run: RunFolder, console: Console) -> None:
    status = status_of(run)
    console.print(f"step {status.step_number} of {status.num_steps}, conductor at {run.url('conductor')}")
    console.print(rank_table(status.ranks))


def rank_table(ranks: list[RankView]) -> Table:
    table = Table(*(Column(name, overflow="fold") for name in COLUMNS), box=None, pad_edge=False)
    for rank in ranks:
        table.add_row(
            *(visible(cell) for cell in (rank.name, rank.state or "fixed", rank.doing, f"{rank.for_s:.0f} s"))
        )
    return table


def add_rank(run: RunFolder) -> str:
    """Have the run's supervisor start one more rank on its machine; the name of that rank."""
    status = status_of(run)
    _check_elastic(run)
    return ask_for_one_more(run, RANK, "a rank", {rank.name for rank in status.ranks})


def drain_rank(run: RunFolder, name: str) -> None:
    """Let a rank go after the update that is being made."""
    _check_not_last(run, name)
    run.admin().drain_rank(name)


def remove_rank(run: RunFolder, name: str) -> None:
    """Let a rank go at once; the others train on what it had."""
    _check_not_last(run, name)
    run.admin().remove_rank(name)


def _check_elastic(run: RunFolder) -> None:
    if not run.config().training.elastic:
        raise UserError("the ranks of this run stay as they are: begin it with training.elastic=true")


def _check_not_last(run: RunFolder, name: str) -> None:
    status = status_of(run)
    _check_elastic(run)
    staying = [rank.name for rank in status.ranks if rank.state != "leaving"]
    training = [rank.name for rank in status.ranks if rank.state == "training"]
    if name not in staying:
        raise UserError(f"there is no rank {name!r} to let go: there are {', '.join(staying) or 'none'}")
    if training == [name]:
        raise UserError(f"{name} is the only rank that trains: add another one first, then let it go")
