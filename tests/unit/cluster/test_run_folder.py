from pathlib import Path

import msgspec
import pytest

from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.config import Config
from polyrhythm.errors import UserError


def test_the_folder_of_a_run_that_goes_on_is_not_reopened(tmp_path: Path):
    config = Config(output_dir=str(tmp_path / "runs"), weights={"root": str(tmp_path / "weights")})
    owner = RunFolder.create(config, tmp_path)
    with pytest.raises(UserError, match="still going on"):
        RunFolder(owner.path).reopen(config, first_step=0)
    path = owner.path
    del owner
    RunFolder(path).reopen(config, first_step=0)


def test_what_a_model_wrote_and_what_a_kill_cut_off_do_not_keep_a_run_from_being_resumed(tmp_path: Path):
    config = Config(output_dir=str(tmp_path / "runs"), weights={"root": str(tmp_path / "weights")})
    run = RunFolder.create(config, tmp_path)
    rows = [{"step": step, "completion": "one\u2028two}\u0085three\u2029}"} for step in (1, 2, 3)]
    lines = [msgspec.json.encode(row) for row in rows]
    (run.path / "samples.jsonl").write_bytes(b"\n".join([*lines, b'{"step": 1, "completion": "{}']))
    path = run.path
    del run
    RunFolder(path).reopen(config, first_step=2)
    kept = (path / "samples.jsonl").read_bytes()
    assert kept == lines[0] + b"\n" + lines[1] + b"\n"


def test_the_folder_of_a_run_is_its_owner_s_alone(tmp_path: Path):
    config = Config(output_dir=str(tmp_path / "runs"), weights={"root": str(tmp_path / "weights")})
    assert RunFolder.create(config, tmp_path).path.stat().st_mode & 0o077 == 0
