"""What an actor does on its node, without Ray and without an actor."""

import json
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from polyrhythm.cluster.ray.command import CONDUCTOR, HOST, PYTHON, TOKEN_FILE, joining_command
from polyrhythm.cluster.ray.node_process import NodeProcess, device_environment, own_environment
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.config import Config, EngineConfig

DEADLINE_S = 60.0
TELLS = """
import json, os, pathlib, sys
from polyrhythm.cluster.local_processes import announce_to_parent
token = pathlib.Path(sys.argv[1])
announce_to_parent("http://here:1")
announce_to_parent("only the first counts")
told = {"token": token.read_text(), "again": token.read_text(), "mode": oct(token.stat().st_mode & 0o777), "python": sys.executable}
print(json.dumps(told | {"cuda": os.environ["CUDA_VISIBLE_DEVICES"], "pgid": os.getpgid(0) == os.getpid()}))
"""


@pytest.fixture
def process() -> Iterator[NodeProcess]:
    process = NodeProcess()
    yield process
    process.signal(signal.SIGKILL)


def all_news(process: NodeProcess) -> tuple[str, str, int]:
    written, until_s = b"", time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        news = process.news(0.5)
        written += news["written"]
        if news["returncode"] is not None:
            return written.decode(), news["url"], news["returncode"]
    raise AssertionError("it did not end")


def test_a_process_reads_its_token_has_its_device_and_tells_its_address(process):
    process.start([PYTHON, "-c", TELLS, TOKEN_FILE], {}, 1, b"secret", {"GPU": ["3"]}, "/nowhere")
    written, url, returncode = all_news(process)
    assert (url, returncode) == ("http://here:1", 0), written
    assert json.loads(written) == {
        "token": "secret", "again": "secret", "mode": "0o600", "python": sys.executable, "cuda": "3", "pgid": True,
    }  # fmt: skip


def test_a_signal_ends_it_and_its_children_are_killed_with_it(process):
    process.start(["sh", "-c", "sleep 600 & echo started; wait"], {}, 1, b"", {}, "/")
    assert process.news(DEADLINE_S)["written"] == b"started\n"
    process.signal(signal.SIGKILL)
    _, _, returncode = all_news(process)
    assert returncode == -signal.SIGKILL


def test_nobody_who_asks_for_news_waits_longer_than_he_says(process):
    process.start(["sleep", "600"], {}, 1, b"", {}, "/")
    assert process.news(0.01) == {"written": b"", "url": "", "returncode": None}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"GPU": ["0", "1"], "NPU": []}, {"POLYRHYTHM_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": "0,1"}),
        ({"NPU": ["2"]}, {"POLYRHYTHM_DEVICE": "npu", "ASCEND_RT_VISIBLE_DEVICES": "2"}),
        ({}, {"POLYRHYTHM_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}),
    ],
)
def test_the_devices_are_those_that_ray_has_assigned(given, expected):
    assert device_environment(given) == expected


def test_what_ray_tells_its_worker_stays_there(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    environment = own_environment(3)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert not [name for name in environment if name.startswith(("RAY_", "CUDA_VISIBLE"))]


def test_an_engine_elsewhere_joins_instead_of_opening_the_folder(tmp_path):
    folder, config = RunFolder(tmp_path), Config(model="hub/name", engine=EngineConfig(resources={"CPU": 4}))
    command = ["/here/python", "-m", "polyrhythm", "engine", "--name", "engine-0", "--run", str(tmp_path)]
    assert joining_command(command, folder, config) == [
        PYTHON, "-m", "polyrhythm", "engine", "--name", "engine-0", "--join", CONDUCTOR, "--token-file", TOKEN_FILE,
        "--model", "hub/name", "--threads", "4", "--host", HOST,
    ]  # fmt: skip
    assert joining_command(["sleep", "1"], folder, config) == ["sleep", "1"]
