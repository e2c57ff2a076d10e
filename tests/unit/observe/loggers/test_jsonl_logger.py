"""The files of a run."""

import json
from pathlib import Path

from polyrhythm.observe.loggers.jsonl import JsonlLogger, read_metrics
from polyrhythm.observe.loggers.logger import LoggedRun


def test_a_written_step_can_be_read_at_once(tmp_path: Path) -> None:
    with JsonlLogger(LoggedRun(tmp_path)) as logger:
        logger.log(1, {"reward/mean": 0.5})
        logger.log(2, {"reward/mean": float("nan")})
        records = read_metrics(tmp_path)
    assert [record["step"] for record in records] == [1, 2]
    assert [record["policy_version"] for record in records] == [0, 1]
    assert records[0]["reward/mean"] == 0.5 and records[0]["time"] > 1e9
    assert records[1]["reward/mean"] is None


def test_samples_have_a_line_each(tmp_path: Path) -> None:
    with JsonlLogger(LoggedRun(tmp_path)) as logger:
        logger.log_samples(3, [{"completion": "a\nb", "reward": 1.0}, {"completion": "é", "reward": None}])
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 3, "policy_version": 2, "completion": "a\nb", "reward": 1.0},
        {"step": 3, "policy_version": 2, "completion": "é", "reward": None},
    ]


def test_a_resumed_run_appends_after_half_a_line_and_its_own_records_count(tmp_path: Path) -> None:
    with JsonlLogger(LoggedRun(tmp_path)) as logger:
        logger.log(0, {"reward/mean": 0.1})
        logger.log(1, {"reward/mean": 0.2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    with JsonlLogger(LoggedRun(tmp_path)) as logger:
        logger.log(1, {"reward/mean": 0.3})
        logger.log(2, {"reward/mean": 0.4})
    assert [(record["step"], record["reward/mean"]) for record in read_metrics(tmp_path)] == [
        (0, 0.1),
        (1, 0.3),
        (2, 0.4),
    ]


def test_a_run_without_metrics_has_none(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
