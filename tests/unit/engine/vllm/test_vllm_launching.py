"""Which vLLM is started and how: mistakes are found before anything starts."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from polyrhythm.config import EngineConfig, load_config
from polyrhythm.engine.vllm import launching
from polyrhythm.engine.vllm.process import GUARD, VllmProcess
from polyrhythm.environments import Environment, environment
from polyrhythm.errors import RunError, UserError

DEADLINE_S = 30.0


def config_of(**keys) -> EngineConfig:
    return EngineConfig(**({"kind": "vllm", "max_batch": 8} | keys))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    shape = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return tmp_path


@pytest.fixture
def fake_python(tmp_path: Path):
    """An interpreter whose vLLM has the version that it is made for; the empty one has none."""

    def make(version: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{f'echo {version}' if version else 'exit 1'}\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_a_vllm_that_is_too_old_or_missing_is_refused_by_name(fake_python, monkeypatch, tmp_path):
    assert launching.check_vllm(config_of(python=fake_python("0.32.0+cpu"))) == "0.32.0+cpu"
    with pytest.raises(UserError, match=r"has vLLM 0\.9\.2: it must be 0\.32 or newer"):
        launching.check_vllm(config_of(python=fake_python("0.9.2")))
    with pytest.raises(UserError, match="has no vLLM: install it there, or run `polyrhythm setup vllm`"):
        launching.check_vllm(config_of(python=fake_python("")))
    with pytest.raises(UserError, match="cannot be run"):
        launching.check_vllm(config_of(python=str(tmp_path / "nowhere")))
    monkeypatch.setenv("POLYRHYTHM_ENVIRONMENTS", str(tmp_path))
    with pytest.raises(UserError, match="run `polyrhythm setup vllm`"):
        launching.check_vllm(config_of())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "must be 'processed_logprobs' here"),
        ({"max-num-seqs": 3}, "use engine.max_batch"),
        ({"port": 8000}, "use engine.url"),
    ],
)
def test_options_that_are_not_the_users_to_give_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        launching.check_vllm(config_of(options=options))


def test_options_are_passed_on_as_they_are(model_dir):
    options = {"enforce-eager": True, "enable_prefix_caching": False, "block-size": 32, "compilation-config": {"a": 1}}
    config = config_of(options=options, python="/opt/python")
    command = launching.command_of(config, "0.32.0", model_dir, Path("/tmp/s"), 256)
    line = " ".join(command)
    assert line.startswith(f"/opt/python -m vllm.entrypoints.cli.main serve {model_dir} --dtype float32 ")
    assert '--no-enable-prefix-caching --block-size 32 --compilation-config {"a": 1}' in line
    assert "--max-num-seqs 8 --max-model-len 256 --uds /tmp/s" in line
    assert "kv-cache-memory-bytes" not in line, "the memory of an accelerator is vLLM's to divide"


def test_on_a_cpu_the_cache_holds_what_can_decode_together_and_no_more(model_dir):
    per_token = 2 * 30 * 3 * 64 * 4

    def cache_of(**keys) -> int:
        command = launching.command_of(config_of(python="p", **keys), "0.32.0+cpu", model_dir, Path("/s"), 256)
        return int(command[command.index("--kv-cache-memory-bytes") + 1])

    assert cache_of() == 8 * 256 * per_token
    assert cache_of(kv_tokens=1000) == 1000 * per_token
    assert cache_of(kv_tokens=1000, options={"dtype": "bfloat16"}) == 500 * per_token
    assert cache_of(options={"kv_cache_memory_bytes": 5}) == 5
    assert cache_of(kv_tokens=10**9) < psutil.virtual_memory().total / 2


def test_a_server_without_a_route_is_refused_by_the_name_of_the_route():
    described = json.dumps({"paths": {route: {} for route in launching.NEEDED_ROUTES}}).encode()
    launching.check_routes(described, "at http://localhost:8000")
    without = json.dumps({"paths": {route: {} for route in launching.NEEDED_ROUTES[1:]}}).encode()
    with pytest.raises(UserError, match=r"at http://localhost:8000 has no route /collective_rpc: .*--enable-scale-out"):
        launching.check_routes(without, "at http://localhost:8000")


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"python": "/usr/bin/python"}, "engine.python='/usr/bin/python' goes with engine.kind=\"vllm\""),
        ({"options": {"dtype": "float32"}}, "goes with engine.kind"),
    ],
)
def test_keys_of_vllm_with_another_kind_are_a_mistake(engine, said):
    with pytest.raises(UserError, match=said):
        load_config([], {"engine": engine})


def test_what_does_not_go_with_vllm_is_said_before_anything_starts():
    with pytest.raises(UserError, match=r'cluster\.cores="follow" does not go with engine\.kind="vllm"'):
        load_config([], {"engine": {"kind": "vllm"}, "cluster": {"cores": "follow"}})
    with pytest.raises(UserError, match="is one server"):
        load_config([], {"engine": {"kind": "vllm", "url": "http://localhost:1"}, "cluster": {"num_engines": 2}})
    assert load_config([], {"engine": {"kind": "vllm"}}).engine.joins_within_s == 900
    assert load_config([], {}).engine.joins_within_s == 120


def test_the_environment_of_a_run_does_not_reach_vllm(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    variables = launching.variables_of(tmp_path)
    assert variables["PYTHONPATH"] == str(launching.WORKER_FOLDER)
    assert variables["VLLM_LOGGING_LEVEL"] == "DEBUG" and variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert {path.name for path in launching.WORKER_FOLDER.glob("*.py")} == {
        "__init__.py", "polyrhythm_meeting.py", "polyrhythm_worker.py",
    }  # fmt: skip


def test_an_environment_is_made_again_when_its_pins_have_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYRHYTHM_ENVIRONMENTS", str(tmp_path))
    with pytest.raises(UserError, match="there is no environment 'sglang' to make: there is vllm"):
        environment("sglang")
    pins = tmp_path / "pins.txt"
    pins.write_text("a==1\n")
    made = Environment("x", pins)
    assert not made.is_made and made.python == tmp_path / "x" / "bin" / "python"
    made.folder.mkdir()
    (made.folder / "installed").write_text(made._digest())
    assert made.is_made and made.make(print) == made.python
    pins.write_text("a==2\n")
    assert not made.is_made


# The server's processes.


def shell(script: str):
    return lambda socket: ["/bin/sh", "-c", script]


def ends(pid: int) -> bool:
    until_s = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def written(path: Path) -> str:
    until_s = time.monotonic() + DEADLINE_S
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return path.read_text()


def test_leaving_ends_the_server_and_what_it_has_started(tmp_path):
    script = f"sleep 1000 & echo $! $$ > {tmp_path}/pids; wait"
    with VllmProcess(shell(script), lambda folder: dict(os.environ)) as process:
        pids = [int(pid) for pid in written(tmp_path / "pids").split()]
        folder = process.socket.parent
        assert folder.stat().st_mode & 0o777 == 0o700
        process.check_runs()
    assert all(ends(pid) for pid in pids) and not folder.exists()


def test_the_server_ends_with_its_parent_even_if_that_is_killed(tmp_path):
    script = f"sleep 1000 & echo $! $$ > {tmp_path}/pids; wait"
    code = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, {str(GUARD)!r}, "/bin/sh", "-c", {script!r}], stdin=subprocess.PIPE)
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    pids = [int(pid) for pid in written(tmp_path / "pids").split()]
    parent.kill()
    parent.wait(DEADLINE_S)
    assert all(ends(pid) for pid in pids)


@pytest.mark.parametrize(("code", "kind"), [(1, RunError), (2, UserError), (9, RunError)])
def test_how_a_server_ended_is_said(code, kind):
    with VllmProcess(shell(f"exit {code}"), lambda folder: dict(os.environ)) as process:
        until_s = time.monotonic() + DEADLINE_S
        with pytest.raises(kind):
            while time.monotonic() < until_s:
                process.check_runs()
                time.sleep(0.01)
