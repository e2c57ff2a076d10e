"""The live terminal view: redrawn in place while the run goes on, replaced by the summary at its end."""

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from polyrhythm.observe.status import RunStatus
from polyrhythm.observe.terminal.frame import frame_lines, starting_lines
from polyrhythm.observe.terminal.summary import summary
from polyrhythm.observe.terminal.text import visible


class LiveView:
    """Redraws in place on every update; leaves the summary behind."""

    def __init__(self, run_dir: Path, console: Console, clock: Callable[[], float] = time.time) -> None:
        self._run_dir = run_dir
        self._console = console
        self._clock = clock
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._live.start()

    def starting(self, num_engines: int, num_ranks: int) -> None:
        self._show(starting_lines(num_engines, num_ranks))

    def update(self, status: RunStatus) -> None:
        # One line less than the terminal has: the cursor needs the last one.
        size = self._console.size
        self._show(frame_lines(status, self._clock(), size.width, size.height - 1))

    def note(self, line: str) -> None:
        self._console.print(visible(line))

    def close(self, outcome: str) -> None:
        self._live.stop()
        self._console.print(summary(self._run_dir, outcome, self._console.width))

    def _show(self, lines: list[Text]) -> None:
        self._live.update(Text("\n", no_wrap=True, overflow="crop").join(lines), refresh=True)
