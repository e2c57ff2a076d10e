"""One line per finished step, for logs and pipes."""

from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from polyrhythm.observe.loggers.jsonl import read_metrics
from polyrhythm.observe.status import RunStatus
from polyrhythm.observe.terminal.frame import starting_processes
from polyrhythm.observe.terminal.summary import summary
from polyrhythm.observe.terminal.text import visible

# Metric, what it is called in a line, and how it is written.
COLUMNS = (
    ("reward/mean", "reward", ".3f"),
    ("reward/accuracy", "accuracy", ".3f"),
    ("time/step_s", "step_s", ".1f"),
    ("generate/tokens_per_s", "tokens_per_s", ".0f"),
    ("train/grad_norm", "grad_norm", ".3g"),
    ("mismatch/logprob_abs_mean", "mismatch", ".1e"),
    ("onpolicy/violations", "off_policy", ".0f"),
)


class PlainView:
    """Prints each step of this start once, however rarely it is updated."""

    def __init__(self, run_dir: Path, stream: TextIO, first_step: int = 0) -> None:
        self._run_dir = run_dir
        self._stream = stream
        self._last_shown = first_step
        self._num_steps = 0
        self._failure: str | None = None

    def starting(self, num_engines: int, num_ranks: int) -> None:
        self._print(f"starting: {starting_processes(num_engines, num_ranks)}")

    def update(self, status: RunStatus) -> None:
        self._num_steps = status.num_steps
        if status.num_finished_steps > self._last_shown:
            self._show_new_steps()
        if status.failure and status.failure != self._failure:
            self._failure = status.failure
            self._print(f"failure: {visible(status.failure)}")

    def note(self, line: str) -> None:
        self._print(visible(line))

    def close(self, outcome: str) -> None:
        # The run may have ended between two updates.
        self._show_new_steps()
        console = Console(width=80, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(summary(self._run_dir, outcome))
        self._print(capture.get().rstrip("\n"))

    def _show_new_steps(self) -> None:
        for record in read_metrics(self._run_dir):
            if record["step"] > self._last_shown:
                self._last_shown = record["step"]
                self._print(step_line(record, self._num_steps))

    def _print(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        # A terminal without these characters shows question marks rather than ending the run.
        print(text.encode(encoding, errors="replace").decode(encoding), file=self._stream, flush=True)


def step_line(record: dict[str, Any], num_steps: int) -> str:
    """The step and the metrics that are there."""
    number = record["step"]
    values = [f"{name} {record[key]:{form}}" for key, name, form in COLUMNS if record.get(key) is not None]
    if excluded := record.get("reward/excluded"):
        values.append(f"excluded {excluded:.0f} (rewards that failed: logs/conductor.log)")
    return "  ".join([f"step {number}/{num_steps}" if num_steps else f"step {number}", *values])
