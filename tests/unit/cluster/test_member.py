"""What an engine needs to join a run, and what is said when it is missing."""

import json
from pathlib import Path

import pytest

from polyrhythm import __version__
from polyrhythm.cluster.admin import RunAdmin, Unreachable
from polyrhythm.cluster.member import (
    _check_rank,
    _engine_config,
    _find_model,
    _shared_folder,
    ask_about_run,
    joining_engine,
    own_device,
    read_run_credentials,
)
from polyrhythm.config import Config, EngineConfig, TrainingConfig
from polyrhythm.errors import UserError
from polyrhythm.http.credentials import Credentials
from polyrhythm.messages import RunInfo, Setup

SETUP = Setup("1.2.3", "4.5.6", {})
SECRETS = {"generate": "g" * 20, "admin": "a" * 20}


def token_file(folder: Path, content: str, mode: int = 0o600) -> Path:
    path = folder / "tokens.json"
    path.write_text(content)
    path.chmod(mode)
    return path


def info(model_dir: Path) -> RunInfo:
    return RunInfo("/run", str(model_dir), "/store", SETUP, {}, 0, has_optimizer=False)


def test_the_tokens_of_a_run_are_read(tmp_path):
    assert read_run_credentials(token_file(tmp_path, json.dumps(SECRETS))) == Credentials(SECRETS)


@pytest.mark.parametrize("content", ["", "a-single-token", "[]", '{"admin": "x"}', '{"admin": 1, "generate": "x"}'])
def test_another_file_than_tokens_json_is_refused_without_showing_it(tmp_path, content):
    with pytest.raises(UserError, match=r"is not the tokens\.json of a run") as caught:
        read_run_credentials(token_file(tmp_path, content))
    assert not content or content not in str(caught.value)


def test_tokens_that_others_can_read_are_refused(tmp_path):
    with pytest.raises(UserError, match="chmod 600"):
        read_run_credentials(token_file(tmp_path, json.dumps(SECRETS), mode=0o640))


def test_the_model_folder_of_the_run_is_used_if_it_is_here(tmp_path):
    (tmp_path / "config.json").touch()
    assert _find_model(info(tmp_path), Config(model="some/model"), None) == tmp_path


def test_a_model_folder_that_is_not_here_must_be_named(tmp_path):
    with pytest.raises(UserError, match=r"elsewhere is not on this machine: give --model .*'\./mine'"):
        _find_model(info(tmp_path / "elsewhere"), Config(model="./mine"), None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
async def test_an_address_that_says_nothing_to_the_conductor_is_refused(tmp_path, host):
    with pytest.raises(UserError, match="give the address at which it reaches this engine"):
        await joining_engine(
            "http://127.0.0.1:9", token_file=tmp_path, name=None, model=None, host=host, port=0, num_threads=1,
            always_download=False, of_kind={},
        )  # fmt: skip


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "https://x", "file:///etc/passwd", "http://"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(UserError, match="no address of a conductor"):
        RunAdmin(url, "secret")


def test_nobody_at_the_address_is_said():
    with pytest.raises(Unreachable, match="cannot be reached"):
        RunAdmin("http://127.0.0.1:9", "secret").info()


def test_an_engine_may_be_of_another_kind_than_those_of_the_run():
    of_run = EngineConfig(kind="vllm", python="/there/python", options={"enforce-eager": True}, max_batch=9)
    run = Config(engine=of_run, dtype="bfloat16")
    same = _engine_config(run, {"threads": 2, "python": "/here/python"})
    assert (same.kind, same.python) == ("vllm", "/here/python")
    assert same.options == {"enforce-eager": True, "dtype": "bfloat16"}, "it computes in what weights come in"
    assert _engine_config(run, {"threads": 2}).python == "", "an interpreter is that of a machine"
    other = _engine_config(run, {"kind": "embedded", "threads": 2})
    assert (other.kind, other.options, other.max_batch, other.threads) == ("embedded", {}, 9, 2)
    with pytest.raises(UserError, match=r'goes with engine\.kind="vllm"'):
        _engine_config(run, {"kind": "embedded", "url": "http://localhost:1"})


def test_the_rank_is_that_of_the_flag_or_of_the_environment_and_must_be_one_of_the_run():
    two = Config(training=TrainingConfig(num_ranks=2))
    assert _check_rank(two, None, {}) is None, "a free one"
    assert _check_rank(two, None, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "elsewhere"}) == 1
    assert _check_rank(two, 0, {"RANK": "1"}) == 0
    for rank, environment, said in (
        (2, {}, "--rank 2: from 0 to 1"),
        (None, {"RANK": "7"}, "RANK 7: from 0 to 1"),
        (None, {"RANK": "x"}, "RANK=x is no number"),
        (0, {"WORLD_SIZE": "4"}, r"WORLD_SIZE=4, but the run has training\.num_ranks=2: make them equal"),
    ):
        with pytest.raises(UserError, match=said):
            _check_rank(two, rank, environment)


def test_a_rank_that_torchrun_has_started_beside_others_sees_its_own_device_alone(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    assert own_device("auto", {}) == {"POLYRHYTHM_DEVICE": "auto"}
    assert own_device("cpu", {"LOCAL_RANK": "1"}) == {"POLYRHYTHM_DEVICE": "cpu"}
    seen = own_device("cuda", {"LOCAL_RANK": "1"})
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["ASCEND_RT_VISIBLE_DEVICES"]) == ("6", "1")
    with pytest.raises(UserError, match="LOCAL_RANK=2, but CUDA_VISIBLE_DEVICES=4,6 names 2 devices"):
        own_device("cuda", {"LOCAL_RANK": "2"})


def test_a_folder_is_that_of_the_run_if_it_has_the_runs_tokens(tmp_path):
    run, secrets = tmp_path / "run", Credentials(SECRETS)
    (run / "weights").mkdir(parents=True)
    about = RunInfo(str(run), "/model", str(run / "weights"), SETUP, {}, 0, has_optimizer=False)
    assert _shared_folder(about, secrets, tmp_path) is None, "a folder without tokens is not a run"
    token_file(run, json.dumps(SECRETS))
    shared = _shared_folder(about, secrets, tmp_path)
    assert shared is not None and (shared.path, shared.model_dir) == (run, tmp_path)
    assert _shared_folder(about, Credentials(SECRETS | {"admin": "other"}), tmp_path) is None
    elsewhere = RunInfo(str(run), "/model", "/dev/shm/of-another-machine", SETUP, {}, 0, has_optimizer=False)
    assert _shared_folder(elsewhere, secrets, tmp_path) is None, "its weight store is not here"


def test_a_conductor_that_is_not_there_is_a_mistake_of_the_user():
    with pytest.raises(UserError, match=r"--join http://127.0.0.1:9: .* cannot be reached.*is the run going on"):
        ask_about_run("http://127.0.0.1:9", Credentials(SECRETS))


def test_a_run_of_another_version_of_the_package_is_a_mistake_that_names_both(monkeypatch):
    monkeypatch.setattr(RunAdmin, "info", lambda self: info(Path("/model")))
    with pytest.raises(
        UserError, match=rf"this machine has polyrhythm {__version__}, the run at http://x has 1\.2\.3: install"
    ):
        ask_about_run("http://x", Credentials(SECRETS))
