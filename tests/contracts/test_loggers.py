"""What every registered logger promises, and what a run is promised about loggers."""

import importlib.util
import logging
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.config import Config
from polyrhythm.errors import UserError
from polyrhythm.observe.loggers import LOGGERS, LoggedRun, Loggers, find_loggers
from polyrhythm.observe.loggers.background import BackgroundLogger
from polyrhythm.observe.loggers.jsonl import JsonlLogger, read_metrics
from polyrhythm.user_code import find_kind
from tests.logged import PROJECT, READERS

METRICS = {"reward/mean": 0.5, "train/entropy": float("nan"), "groups/skipped": 1}
SAMPLES = [
    {"prompt": [{"role": "user", "content": "é\n"}], "completion": "a\u2028 *b*", "reward": None, "columns": {"a": [1]}}
]
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def trackio_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trackio")
    os.environ["TRACKIO_DIR"] = str(folder)  # read once, when trackio is imported
    return folder


def log_a_step(logger: Any, step: int) -> None:
    logger.log(step, METRICS | {"step/value": step * 2.0})
    logger.log_samples(step, SAMPLES)


@pytest.mark.parametrize("name", sorted(LOGGERS))
def test_what_a_logger_was_told_can_be_read_back_also_when_the_run_was_resumed(
    name: str, tmp_path: Path, trackio_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("MLFLOW_TRACKING_URI", "WANDB_API_KEY", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # to read it back here
    make = find_kind("observe.loggers", name, LOGGERS, "logger")
    for num_finished, steps in ((0, (1, 2, 3)), (2, (3, 4))):  # the third is made again
        logger = make(LoggedRun(tmp_path, PROJECT, "a run", Config().model_dump(), num_finished))
        for step in steps:
            log_a_step(logger, step)
        logger.close()
    logged, samples = READERS[name](tmp_path, trackio_dir)
    assert sorted(logged) == [1, 2, 3, 4]
    for step, metrics in logged.items():
        assert metrics["reward/mean"] == 0.5 and metrics["step/value"] == step * 2
        assert metrics["train/entropy"] is None or math.isnan(metrics["train/entropy"])
    assert "*b*" in samples and "é" in samples


class Recording:
    """A logger of a user's, as `module:Class`, that keeps what it is told."""

    def __init__(self, run: LoggedRun) -> None:
        self.steps: list[int] = []
        self.is_closed = False

    def log(self, step: int, metrics: Any) -> None:
        self.steps.append(step)

    def log_samples(self, step: int, samples: Any) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class Broken(Recording):
    """Its disk is full, or its service is gone."""

    def log(self, step: int, metrics: Any) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise RuntimeError("close failed too")


def broken_at_the_start(run: LoggedRun) -> Recording:
    raise ConnectionError("no such service")


def leaves(run: LoggedRun) -> Recording:
    raise SystemExit("some libraries end the process")


@pytest.mark.parametrize("broken", [Broken, broken_at_the_start, leaves])
def test_a_logger_that_raises_is_dropped_with_one_warning_and_hinders_neither_the_run_nor_other_loggers(
    broken: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Recording(LoggedRun(tmp_path))
    with Loggers(LoggedRun(tmp_path), {"broken": broken, "other": lambda _: other}) as loggers:
        for step in (1, 2, 3):
            log_a_step(loggers, step)
    (said,) = caplog.records
    assert "logger broken failed" in said.getMessage() and said.exc_info, "the traceback is in the log"
    (shown,) = loggers.warnings
    assert shown.startswith(f"{said.getMessage()} ("), "one line, with the cause"
    assert [record["step"] for record in read_metrics(tmp_path)] == other.steps == [1, 2, 3] and other.is_closed


class Hanging(Recording):
    """Never comes back from the first call, unless a test lets it."""

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self.hangs, self.may_go_on = threading.Event(), threading.Event()

    def log(self, step: int, metrics: Any) -> None:
        self.hangs.set()
        self.may_go_on.wait(DEADLINE_S)
        super().log(step, metrics)


@pytest.fixture
def hanging(tmp_path: Path):
    logger = Hanging(LoggedRun(tmp_path))
    yield logger
    logger.may_go_on.set()


def test_a_logger_that_hangs_is_dropped_with_one_warning_and_nobody_waits_for_it(
    hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    logger = BackgroundLogger("hanging", lambda: hanging, call_deadline_s=0.0)
    logger.log(1, METRICS)
    assert hanging.hangs.wait(DEADLINE_S)
    logger.log(2, METRICS)
    logger.log(3, METRICS)
    logger.close(DEADLINE_S)  # returns at once: there is nothing to wait for
    (said,) = caplog.records
    assert "logger hanging does not return" in said.getMessage() and not hanging.steps


def test_one_that_hangs_while_it_is_made_is_dropped_too(hanging: Hanging, caplog: pytest.LogCaptureFixture) -> None:
    logger = BackgroundLogger("hanging", lambda: hanging.log(0, {}), open_deadline_s=0.0)  # type: ignore[arg-type]
    assert hanging.hangs.wait(DEADLINE_S)
    log_a_step(logger, 1)
    (said,) = caplog.records
    assert "logger hanging does not return" in said.getMessage()


def test_one_that_is_slow_loses_what_its_queue_has_no_room_for_and_that_is_counted(
    hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    logger = BackgroundLogger("slow", lambda: hanging, queue_size=2)
    logger.log(1, METRICS)
    assert hanging.hangs.wait(DEADLINE_S)
    for step in range(2, 7):
        logger.log(step, METRICS)
    hanging.may_go_on.set()
    logger.close(DEADLINE_S)
    assert hanging.steps == [1, 2, 3] and hanging.is_closed
    first, last = (record.getMessage() for record in caplog.records)
    assert "logger slow is too slow" in first and "3 calls were dropped" in last


def test_closing_waits_for_a_slow_logger_until_its_deadline(hanging: Hanging, caplog: pytest.LogCaptureFixture) -> None:
    logger = BackgroundLogger("slow", lambda: hanging)
    logger.log(1, METRICS)
    logger.close(0.01)
    (said,) = caplog.records
    assert "logger slow has not closed" in said.getMessage()


def test_the_record_of_a_run_is_tried_again_when_the_disk_was_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    asked: list[int] = []
    write = JsonlLogger.log
    monkeypatch.setattr(
        JsonlLogger, "log", lambda self, step, metrics: (asked.append(step), write(self, step, metrics))
    )
    with Loggers(LoggedRun(tmp_path)) as loggers:
        log_a_step(loggers, 1)
        log_a_step(loggers, 2)
    assert asked == [1, 2] and [record.levelno for record in caplog.records] == [logging.ERROR]


def test_an_unknown_logger_and_a_missing_package_are_told_before_a_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"observe.loggers='tensorbord' is not a logger: use jsonl, tensorboard, wandb"):
        find_loggers(["tensorbord"])
    with pytest.raises(UserError, match=r"observe.loggers='no_such:Logger' cannot be imported"):
        find_loggers(["no_such:Logger"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'polyrhythm\[wandb\]'"):
        find_loggers(["wandb"])


def test_a_logger_of_the_users_is_found_by_module_and_class_and_jsonl_is_there_anyway() -> None:
    name = f"{__name__}:Recording"
    assert list(find_loggers([name, "jsonl"])) == [name]
