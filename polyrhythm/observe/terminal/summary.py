"""The end of a run: its curve, and where things are."""

import json
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from polyrhythm.observe.loggers.jsonl import METRICS_FILE, SAMPLES_FILE, read_metrics
from polyrhythm.observe.terminal.curve import plot_text

PLACES = {
    METRICS_FILE: "metrics of every step",
    SAMPLES_FILE: "sampled completions with their rewards",
    "config.toml": "the resolved configuration",
    "config.json": "the resolved configuration",
    "model": "the trained model",
    "logs": "one log file per process",
}
_NAME_WIDTH = max(map(len, PLACES)) + 2


def summary(run_dir: Path, outcome: str, width: int = 80) -> RenderableType:
    """Outcome, curve of reward and accuracy, and the paths that exist in the run folder."""
    records = read_metrics(run_dir)
    parts: list[RenderableType] = [Text(f"{outcome} after {_steps(len(records))}", style="bold")]
    rewards = [record.get("reward/mean") for record in records]
    accuracies = [record.get("reward/accuracy") for record in records]
    plot_width = min(width, 80)
    if records and rewards == accuracies:
        parts.append(plot_text("accuracy (and reward)", accuracies, plot_width))
    elif records:
        if any(accuracy is not None for accuracy in accuracies):
            parts.append(plot_text("accuracy", accuracies, plot_width, height=5))
        parts.append(plot_text("reward", rewards, plot_width, height=5))
    parts.append(Text(f"run folder: {run_dir}", overflow="fold"))
    parts.extend(Text(f"  {name:<{_NAME_WIDTH}}{what}") for name, what in PLACES.items() if _is_there(run_dir / name))
    if _is_there(run_dir / "model"):
        parts.extend(Text(line, overflow="fold") for line in _number_format(run_dir))
    return Group(*parts)


def _number_format(run_dir: Path) -> list[str]:
    """A line if the trained model has fewer digits than training had."""
    dtype = json.loads((run_dir / "model" / "config.json").read_text()).get("dtype", "float32")
    config = json.loads((run_dir / "config.json").read_text())
    if dtype == "float32" or config["training"]["save_dtype"] != "auto":
        return []
    return [
        f'the model is saved in {dtype}, the number format of {config["model"]}; training.save_dtype = "float32" keeps all digits'
    ]


def _is_there(path: Path) -> bool:
    return path.is_dir() or (path.is_file() and path.stat().st_size > 0)


def _steps(num_steps: int) -> str:
    return "1 step" if num_steps == 1 else f"{num_steps} steps"
