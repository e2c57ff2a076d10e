"""What is left of a run: its folder, as a script or notebook reads it."""

from pathlib import Path
from typing import Any

from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.config import Config
from polyrhythm.observe.loggers.jsonl import read_metrics, read_samples


class Run:
    """A finished run. Everything is read from its folder when it is asked for: `Run("runs/<time>")` opens an earlier one."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return RunFolder(self.folder).config()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict per step: what metrics.jsonl holds."""
        return read_metrics(self.folder)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Sampled completions with their rewards, observe.samples_per_step of every step."""
        return read_samples(self.folder)

    @property
    def model_dir(self) -> Path:
        """The trained model, for `from_pretrained` or `polyrhythm engine --model`."""
        return RunFolder(self.folder).trained_model

    def __repr__(self) -> str:
        rewards = [step["reward/mean"] for step in self.metrics if step.get("reward/mean") is not None]
        curve = f", reward {rewards[0]:.3f} at first, {rewards[-1]:.3f} at last" if rewards else ""
        model = f"; model in {self.model_dir}" if self.model_dir.exists() else ""
        return f"Run({str(self.folder)!r}): {len(self.metrics)} steps{curve}{model}"
