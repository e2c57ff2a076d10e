import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.config import Config
from polyrhythm.errors import UserError
from tests.tiny_model import save_tiny_model


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


def test_a_weight_store_without_room_for_the_model_is_refused_with_the_numbers(tmp_path: Path, monkeypatch):
    model_dir = save_tiny_model(tmp_path / "model")
    size = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    keys = {"output_dir": str(tmp_path / "runs"), "weights": {"root": str(tmp_path / "weights")}}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * size))
    with pytest.raises(UserError, match=r"weights.root='.*' has room for .* MB, and 3 snapshots .* take .*: make room"):
        RunFolder.create(Config(**keys), model_dir)
    assert not list((tmp_path / "runs").iterdir())
    RunFolder.create(Config(**keys, dtype="bfloat16"), model_dir)


def test_the_folder_of_a_run_is_its_owner_s_alone(tmp_path: Path):
    config = Config(output_dir=str(tmp_path / "runs"), weights={"root": str(tmp_path / "weights")})
    assert RunFolder.create(config, tmp_path).path.stat().st_mode & 0o077 == 0
