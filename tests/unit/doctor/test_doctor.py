"""The doctor on this machine, on devices and engines that are pretended: it finds what is wrong, and says what to do."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from polyrhythm.cli.main import main
from polyrhythm.config import load_config
from polyrhythm.devices import found
from polyrhythm.devices.found import Device, FoundDevices
from polyrhythm.doctor import devices, machine, numerics
from polyrhythm.doctor.engine import check_engine
from polyrhythm.doctor.findings import Finding, findings_of, in_words
from polyrhythm.training.packing.reference_attention import looped_attention
from tests.tiny_model import save_tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def engine(request) -> Iterator[str]:
    """A server that answers GET as `request.param` says, by path; anything else does not exist."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            status, content = request.param.get(self.path, request.param.get("*", (404, {})))
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


OPEN = {
    "/health": (200, {}),
    "/version": (200, {"version": "0.31.0"}),
    "/v1/models": (200, {"data": [{"id": "smol"}]}),
    "/collective_rpc": (405, {}),
    "/reset_prefix_cache": (405, {}),
    "/openapi.json": (200, {}),
}
CLOSED = {"/health": (200, {}), "*": (401, {})}


@pytest.mark.parametrize("engine", [OPEN], indirect=True, ids=["open"])
def test_an_engine_with_open_administrative_routes_is_a_problem(engine):
    what, problem, warning, extension, numbers = check_engine(engine)
    assert what.text.endswith("version 0.31.0, serves smol")
    assert problem.state == "problem"
    assert "anybody on this machine may call /collective_rpc, /reset_prefix_cache without a credential" in problem.text
    assert problem.fix
    assert "/openapi.json" in warning.text
    assert "its workers do not have our extension" in extension.text and "docs/vllm.md" in extension.fix
    assert numbers.state == "warning" and "what it computes cannot be seen" in numbers.text


@pytest.mark.parametrize("engine", [CLOSED], indirect=True, ids=["closed"])
def test_an_engine_that_asks_who_calls_is_none(engine):
    *others, numbers = check_engine(engine)
    assert {finding.state for finding in others} == {"ok"}
    assert numbers.state == "warning" and "--token-file" in numbers.fix


def test_an_engine_that_is_not_there_is_told():
    (finding,) = check_engine("http://127.0.0.1:1")
    assert finding.text == "nothing answers at http://127.0.0.1:1" and finding.fix


def test_a_check_that_fails_is_a_problem_and_no_end():
    def fails() -> Iterator[Finding]:
        yield Finding("this", "ok", "so far")
        raise OSError("no such thing")

    assert [finding.state for finding in findings_of("this", fails)] == ["ok", "problem"]
    assert "OSError: no such thing" in list(findings_of("this", fails))[1].text


def test_attention_that_disagrees_is_told_with_the_check_that_failed(monkeypatch):
    def wrong(query, key, value, plan, scale):
        return looped_attention(query, key, value, plan, 2 * scale)

    monkeypatch.setattr(numerics, "cpu_attention", wrong)
    assert all(finding.state == "warning" for finding in numerics.check_attention(CPU))
    assert all("wrong: the output is off by" in finding.text for finding in numerics.check_attention(CPU))
    monkeypatch.setattr(numerics, "looped_attention", wrong)
    assert all(finding.state == "problem" and finding.fix for finding in numerics.check_attention(CPU))


def test_a_device_file_without_a_device_is_a_problem(monkeypatch):
    monkeypatch.setattr(devices, "device_files", lambda: ["/dev/nvidia0"])
    monkeypatch.setattr(devices, "look_in_another_process", lambda: FoundDevices(note="torch 9+cpu finds no device"))
    (finding,) = devices.check_devices()
    assert finding.state == "problem" and "nvidia-smi" in finding.fix


def test_devices_are_listed_with_their_memory(monkeypatch):
    there = FoundDevices("cuda", [Device("a card", 80 * 10**9)])
    monkeypatch.setattr(devices, "look_in_another_process", lambda: there)
    (finding,) = devices.check_devices()
    assert finding.text.startswith("1 of kind cuda: a card with 80.0 GB")


def test_a_model_that_does_not_fit_is_a_problem_with_its_fix(monkeypatch, tmp_path):
    monkeypatch.setattr(found, "device_files", lambda: ["/dev/nvidia0"])
    monkeypatch.setattr(found, "look_in_another_process", lambda: FoundDevices("cuda", [Device("a card", 10**9)]))
    (finding,) = devices.check_memory(load_config([], {}), save_tiny_model(tmp_path))
    assert finding.state == "problem" and finding.fix.startswith("lower training.tokens_per_micro_batch")


def test_too_little_shared_memory_is_told_before_a_run(monkeypatch, tmp_path):
    (enough,) = machine.check_shared_memory(load_config([], {"device": "cpu"}), save_tiny_model(tmp_path))
    assert enough.state == "ok"
    (little,) = machine.check_shared_memory(load_config([], {"device": "cpu", "weights": {"keep": 10**9}}), tmp_path)
    assert little.state == "warning" and "--shm-size" in little.fix


def test_the_command_shows_all_checks_and_writes_them_down(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(numerics, "COPY_BYTES", 2**16)
    output = tmp_path / "doctor.json"
    assert main(["doctor", "--model", str(save_tiny_model(tmp_path / "m")), "--output", str(output)]) == 0
    said = capsys.readouterr().out
    for about in (
        "machine",
        "shared memory",
        "ports",
        "torch",
        "devices",
        "attention",
        "log-probs",
        "copies",
        "memory plan",
    ):
        assert f" {about} " in said
    report = json.loads(output.read_text())
    assert {finding["about"] for finding in report["findings"]} >= {"attention", "memory plan"}
    assert in_words(Finding("a", "problem", "b", "c")).endswith("fix: c")
