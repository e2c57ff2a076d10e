"""What an engine needs to join a run, and what is said when it is missing."""

import json
from pathlib import Path

import pytest

from polyrhythm.cluster.admin import RunAdmin, Unreachable
from polyrhythm.cluster.member import _engine_config, _find_model, joining_engine, read_run_credentials
from polyrhythm.config import EngineConfig
from polyrhythm.errors import UserError
from polyrhythm.http.credentials import Credentials
from polyrhythm.messages import RunInfo

SECRETS = {"generate": "g" * 20, "admin": "a" * 20}


def token_file(folder: Path, content: str, mode: int = 0o600) -> Path:
    path = folder / "tokens.json"
    path.write_text(content)
    path.chmod(mode)
    return path


def info(model: str, model_dir: Path) -> RunInfo:
    return RunInfo(model, str(model_dir), "/store", {}, 3, 60.0, 60.0)


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
    assert _find_model(info("some/model", tmp_path), None) == tmp_path


def test_a_model_folder_that_is_not_here_must_be_named(tmp_path):
    with pytest.raises(UserError, match=r"elsewhere is not on this machine: give --model .*'\./mine'"):
        _find_model(info("./mine", tmp_path / "elsewhere"), None)


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
    of_run = EngineConfig(kind="vllm", python="/there/python", options={"enforce-eager": True}, max_batch=7)
    run = RunInfo("m", "/m", "/s", of_run.model_dump(), 3, 60.0, 60.0)
    same = _engine_config(run, {"threads": 2, "python": "/here/python"})
    assert (same.kind, same.python, same.options) == ("vllm", "/here/python", {"enforce-eager": True})
    assert _engine_config(run, {"threads": 2}).python == "", "an interpreter is that of a machine"
    other = _engine_config(run, {"kind": "embedded", "threads": 2})
    assert (other.kind, other.options, other.max_batch, other.threads) == ("embedded", {}, 7, 2)
    with pytest.raises(UserError, match=r'goes with engine\.kind="vllm"'):
        _engine_config(run, {"kind": "embedded", "url": "http://localhost:1"})
