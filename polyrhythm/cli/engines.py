"""`polyrhythm engines`: the engines of a live run as its user sees and changes them."""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from polyrhythm.cluster.asking import ask_for_one_more, status_of
from polyrhythm.cluster.run_folder import ENGINE, RunFolder
from polyrhythm.errors import UserError
from polyrhythm.observe.status import EngineState, EngineView
from polyrhythm.observe.terminal.text import visible

WIDTH_OF_PIPES = 160
COLUMNS = ("engine", "state", "version", "tokens/s", "running", "waiting", "groups", "address")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["list", "add", "drain", "remove"], help="drain: when its work is done")
    parser.add_argument("name", nargs="?", help="the engine to drain or remove")
    parser.add_argument("--run", type=Path, dest="run_dir", required=True, help="the run folder")


def run(parsed: argparse.Namespace) -> int:
    folder = RunFolder(parsed.run_dir)
    if (parsed.name is None) != (parsed.action in ("list", "add")):
        raise UserError("`engines drain` and `engines remove` need the name of an engine, `list` and `add` need none")
    if parsed.action == "list":
        width = None if sys.stdout.isatty() else WIDTH_OF_PIPES
        list_engines(folder, Console(highlight=False, markup=False, width=width))
    elif parsed.action == "add":
        print(f"{add_engine(folder)} is being started")
    elif parsed.action == "drain":
        drain_engine(folder, parsed.name)
        print(f"{parsed.name} leaves when it has finished what it has")
    else:
        remove_engine(folder, parsed.name)
        print(f"{parsed.name} has left the run")
    return 0


def list_engines(run: RunFolder, console: Console) -> None:
    """Where engines of other machines can join, and a table of those that are there."""
    status = status_of(run)
    console.print(f"step {status.step_number} of {status.num_steps}, conductor at {run.url('conductor')}")
    console.print(engine_table(status.engines))


def engine_table(engines: list[EngineView]) -> Table:
    table = Table(*(Column(name, overflow="fold") for name in COLUMNS), box=None, pad_edge=False)
    for engine in engines:
        state = f"{engine.state}: {engine.cause}" if engine.cause else engine.state
        version = "-" if engine.policy_version is None else f"v{engine.policy_version}"
        numbers = (engine.num_running, engine.num_waiting, engine.num_in_flight_groups)
        cells = (engine.name, state, version, f"{engine.tokens_per_s:.0f}", *map(str, numbers), engine.url)
        table.add_row(*(visible(cell) for cell in cells))
    return table


def add_engine(run: RunFolder) -> str:
    """Have the run's supervisor start one more engine on its machine; the name of that engine."""
    return ask_for_one_more(run, ENGINE, "an engine", {engine.name for engine in status_of(run).engines})


def drain_engine(run: RunFolder, name: str) -> None:
    """Give an engine no further work; it leaves when it has finished what it has."""
    _check_not_last(run, name)
    run.admin().drain(name)


def remove_engine(run: RunFolder, name: str) -> None:
    """Let an engine go at once; what it was working on goes to others."""
    _check_not_last(run, name)
    run.admin().remove(name)


def _check_not_last(run: RunFolder, name: str) -> None:
    staying = [e.name for e in status_of(run).engines if e.state not in (EngineState.DRAINING, EngineState.GONE)]
    if name not in staying:
        raise UserError(f"there is no engine {name!r} to let go: there are {', '.join(staying) or 'none'}")
    if staying == [name]:
        raise UserError(f"{name} is the only engine: add another one first, then let it go")
