from pathlib import Path

import pytest

from polyrhythm.cluster.preflight import check_run
from polyrhythm.config import Config
from polyrhythm.errors import UserError


def config_with_reward(folder: Path, reward: str, memory_mb: int) -> Config:
    (folder / "problems.jsonl").write_text('{"prompt": "1 plus 1 is"}\n')
    task = {"name": "dataset", "options": {"path": str(folder / "problems.jsonl")}}
    return Config.model_validate({"task": task, "reward": {"functions": [reward], "memory_mb": memory_mb}})


def test_a_reward_that_takes_too_much_memory_when_it_is_imported_is_the_users_error(tmp_path: Path, monkeypatch):
    (tmp_path / "greedy.py").write_text("table = bytearray(2**30)\ndef score(completions): return [1.0]\n")
    monkeypatch.chdir(tmp_path)
    check_run(config_with_reward(tmp_path, "greedy:score", memory_mb=4096), None)
    with pytest.raises(UserError, match="'greedy:score' cannot be imported: MemoryError"):
        check_run(config_with_reward(tmp_path, "greedy:score", memory_mb=800), None)


def test_a_switch_of_kernels_that_means_nothing_is_refused_before_any_process_starts(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("POLYRHYTHM_KERNELS", "none")
    with pytest.raises(UserError, match="POLYRHYTHM_KERNELS='none'"):
        check_run(Config(), None)


def test_a_reward_whose_column_one_problem_lacks_is_refused_before_the_start(tmp_path: Path, monkeypatch):
    (tmp_path / "picky.py").write_text("def score(completions, answer, hint='', **others): return [1.0]\n")
    monkeypatch.chdir(tmp_path)
    config = config_with_reward(tmp_path, "picky:score", memory_mb=0)
    with pytest.raises(
        UserError, match="reward 'picky:score' needs the column 'answer', and problem 0 has none: add it"
    ):
        check_run(config, None)
    lines = ['{"prompt": "1 plus 1 is", "answer": 2}'] * 70 + ['{"prompt": "1 plus 2 is", "gold": 3, "level": 1}']
    (tmp_path / "problems.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match="needs the column 'answer', and problem 70 has only gold, level: add it"):
        check_run(config, None)
    (tmp_path / "problems.jsonl").write_text("\n".join(lines[:70]))
    check_run(config, None)


def test_the_columns_of_a_task_without_an_end_are_checked_too(tmp_path: Path, monkeypatch):
    (tmp_path / "picky.py").write_text("def score(completions, digits): return [1.0]\n")
    monkeypatch.chdir(tmp_path)
    config = Config.model_validate({"reward": {"functions": ["picky:score"]}})
    with pytest.raises(UserError, match="'picky:score' needs the column 'digits', and problem 0 has only answer"):
        check_run(config, None)
