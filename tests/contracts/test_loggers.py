"""What every registered logger promises, and what a run is promised about loggers."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from polyrhythm.observe.loggers import LOGGERS, Logger, Loggers
from polyrhythm.observe.loggers.jsonl import read_metrics

METRICS = {"reward/mean": 0.5, "train/entropy": float("nan"), "groups/skipped": 1}
SAMPLES = [
    {"prompt": [{"role": "user", "content": "é\n"}], "completion": "\u2028", "reward": None, "columns": {"a": [1]}}
]


@pytest.fixture(params=list(LOGGERS))
def kind(request: pytest.FixtureRequest) -> Callable[[Path], Logger]:
    return LOGGERS[request.param]


def log_a_step(logger: Logger, step: int) -> None:
    logger.log(step, METRICS)
    logger.log_samples(step, SAMPLES)


def test_a_logger_takes_steps_and_samples_and_can_be_opened_again(kind, tmp_path: Path) -> None:
    num_bytes = 0
    for step in (1, 2):  # as a run that is resumed
        logger = kind(tmp_path)
        log_a_step(logger, step)
        logger.close()
        before, num_bytes = num_bytes, sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        assert num_bytes > before, "what was logged before is kept, and something was added"


class Broken:
    """A logger whose disk is full, or whose service is gone."""

    def __init__(self, folder: Path) -> None:
        self.num_steps = 0

    def log(self, step, metrics) -> None:
        self.num_steps += 1
        raise OSError(28, "No space left on device")

    log_samples = log

    def close(self) -> None:
        raise RuntimeError("close failed too")


def broken_at_the_start(folder: Path) -> Logger:
    raise ConnectionError("no such service")


@pytest.mark.parametrize("broken", [Broken, broken_at_the_start])
def test_a_logger_that_fails_is_logged_once_and_hinders_neither_the_run_nor_other_loggers(
    broken, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), Loggers(tmp_path, {"broken": broken, **LOGGERS}) as loggers:
        for step in (1, 2, 3):
            log_a_step(loggers, step)
    (said,) = caplog.records
    assert "logger broken failed" in said.getMessage() and said.exc_info, "the traceback is in the log"
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_full_disk_ends_no_run(kind, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    with Loggers(tmp_path, {"one": kind}) as loggers:
        log_a_step(loggers, 1)
        log_a_step(loggers, 2)
    assert len(caplog.records) == 1
