"""Which view a run gets."""

import sys
from pathlib import Path
from typing import Literal, Protocol

from polyrhythm.observe.status import RunStatus

ViewMode = Literal["auto", "live", "plain", "none"]


class View(Protocol):
    """Shows a run to its user."""

    def starting(self, num_engines: int, num_ranks: int) -> None:
        """The processes are being started; nobody answers yet."""
        ...

    def update(self, status: RunStatus) -> None:
        """The conductor's status, a few times a second."""
        ...

    def note(self, line: str) -> None:
        """Something the user should know has happened."""
        ...

    def close(self, outcome: str) -> None:
        """The run is over: show its curve and where things are."""
        ...


class NoView:
    """Shows nothing."""

    def starting(self, num_engines: int, num_ranks: int) -> None:
        pass

    def update(self, status: RunStatus) -> None:
        pass

    def note(self, line: str) -> None:
        pass

    def close(self, outcome: str) -> None:
        pass


def make_view(mode: ViewMode, run_dir: Path, first_step: int = 0) -> View:
    """`auto` is live in a terminal and plain anywhere else. `first_step`: steps that were finished before."""
    if mode == "none":
        return NoView()
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if mode == "live" or (mode == "auto" and console.is_terminal and not console.is_dumb_terminal):
        from polyrhythm.observe.terminal.live import LiveView

        return LiveView(run_dir, console)
    from polyrhythm.observe.terminal.plain import PlainView

    return PlainView(run_dir, sys.stdout, first_step)
