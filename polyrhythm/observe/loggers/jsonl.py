"""`metrics.jsonl` and `samples.jsonl` of a run folder: one JSON object per line, appended as steps are committed."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from polyrhythm.observe.loggers.logger import LoggedRun

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class JsonlLogger:
    """Appends to the files of a run folder; what was written is visible to readers at once."""

    def __init__(self, run: LoggedRun) -> None:
        self._metrics = _open_for_lines(run.folder / METRICS_FILE)
        self._samples = _open_for_lines(run.folder / SAMPLES_FILE)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One line with the step, its policy, the time in seconds since the epoch, and the metrics."""
        _write_line(self._metrics, {**_identity(step), "time": time.time(), **metrics})

    def log_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        """One line for each sampled completion."""
        for sample in samples:
            _write_line(self._samples, {**_identity(step), **sample})

    def close(self) -> None:
        try:
            self._metrics.close()
        finally:
            self._samples.close()

    def __enter__(self) -> "JsonlLogger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """One record per step, in order. A step that was logged twice, by a resumed run, counts as logged last."""
    by_step = {record["step"]: record for record in _read_lines(Path(run_dir) / METRICS_FILE)}
    return [by_step[step] for step in sorted(by_step)]


def read_samples(run_dir: Path) -> list[dict[str, Any]]:
    """The sampled completions in the order in which they were logged."""
    return _read_lines(Path(run_dir) / SAMPLES_FILE)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        # A process that died while it wrote has left half a line.
        with contextlib.suppress(msgspec.DecodeError):
            records.append(msgspec.json.decode(line, type=dict[str, Any]))
    return records


def _identity(step: int) -> dict[str, int]:
    """Steps count from 1 wherever users see them; the first one samples from policy version 0 and trains it."""
    return {"step": step, "policy_version": step - 1}


def _open_for_lines(path: Path) -> Any:
    file = path.open("a+b")
    if file.tell() > 0:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


def _write_line(file: Any, record: dict[str, Any]) -> None:
    file.write(msgspec.json.encode(record) + b"\n")
    file.flush()
