"""One run with every logger on, and one logger that fails: all have the values of metrics.jsonl, and nothing is left behind."""

import math
from pathlib import Path

import numpy
import psutil

from tests.logged import PROJECT, READERS

FAILING = """
class Logger:
    def __init__(self, run):
        raise ConnectionError(f"nobody listens to {run.project}/{run.name}")
"""
EXTERNAL = ["mlflow", "tensorboard", "trackio", "wandb"]


def test_every_logger_has_the_values_of_the_record_and_goes_on_in_the_same_run_after_a_resume(cli, monkeypatch):
    trackio_dir = cli.work_dir / "trackio"
    monkeypatch.setenv("TRACKIO_DIR", str(trackio_dir))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # to read it back here
    for variable in ("MLFLOW_TRACKING_URI", "WANDB_API_KEY", "WANDB_MODE", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(cli.work_dir / "none"))  # where a key of wandb's would be
    (cli.work_dir / "failing.py").write_text(FAILING)
    names = [*EXTERNAL, "failing:Logger"]
    first = cli.train(
        num_steps=2, observe__loggers=f"{names}".replace("'", '"'), observe__project=PROJECT, observe__run_name="first"
    )
    assert first.returncode == 0, first.output
    assert "logger failing:Logger failed" in first.output and "wandb logs this run offline" in first.output, (
        "it is shown"
    )
    more = cli.run("train", "--resume", str(first.run_dir), "--num_steps", "3", "--observe.view", "plain")
    assert more.returncode == 0, more.output
    run_dir = more.run_dir
    log = (run_dir / "logs" / "conductor.log").read_text()
    assert log.count("logger failing:Logger failed") == 2, "once for each start"
    assert f"nobody listens to {PROJECT}/first" in log and log.count("wandb logs this run offline") == 2
    rows = more.metrics()
    for name in EXTERNAL:
        steps, samples = READERS[name](run_dir, trackio_dir)
        assert sorted(steps) == [1, 2, 3], name
        for row in rows:
            logged = steps[row["step"]]
            for metric in row.keys() - {"step", "policy_version", "time"}:
                assert is_same(logged[metric], row[metric]), (name, metric)
        assert "plus" in samples, name
    assert not left_behind(cli.work_dir)


def is_same(logged: float, value: float | None) -> bool:
    """TensorBoard keeps 32 bits; a number that is not finite is null in JSON."""
    return not math.isfinite(logged) if value is None else numpy.float32(logged) == numpy.float32(value)


def left_behind(work_dir: Path) -> list[psutil.Process]:
    """Every process of a run, wandb's included, works in the user's folder."""
    return [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(work_dir)]
