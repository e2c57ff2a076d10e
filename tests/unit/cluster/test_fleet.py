"""The engines of a machine, with short-lived processes in place of engines."""

import json
import subprocess
import sys
import time

import pytest

from polyrhythm.cluster import engines
from polyrhythm.cluster import fleet as fleet_module
from polyrhythm.cluster.fleet import Fleet
from polyrhythm.cluster.part import Part
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.errors import RunError

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.processes.mkdir()
    return folder


@pytest.fixture
def make_fleet(folder, monkeypatch):
    """A fleet whose processes sleep; each announces an address of its own."""
    fleets, started = [], []

    def start(_, name, command, num_threads) -> Part:
        started.append(name)
        log = folder.logs / f"{name}.log"
        log.touch()
        folder.announce(name, f"http://{name}/{len(started)}")
        return Part(name, subprocess.Popen(SLEEP, stdin=subprocess.PIPE), log)

    def make(max_restarts: int, *names: str) -> tuple[Fleet, list[str]]:
        notes: list[str] = []
        fleet = Fleet(folder, 1, max_restarts, notes.append)
        fleets.append(fleet)
        for name in names:
            fleet.start(name)
        return fleet, notes

    monkeypatch.setattr(fleet_module, "start_part", start)
    yield make
    for part in [part for fleet in fleets for part in fleet.parts.values()]:
        part.kill()


def status(folder: RunFolder, **states: str) -> dict:
    engines = []
    for name, state in states.items():
        name = name.replace("_", "-")
        state, _, dismissed = state.partition(" ")
        url = folder.url(name) or "http://elsewhere"
        engines.append({"name": name, "state": state, "url": url, "cause": "", "dismissed": bool(dismissed)})
    return {"engines": engines}


def look(fleet: Fleet, seen: dict) -> None:
    fleet.tend(fleet.ended(), seen)


def die(fleet: Fleet, name: str) -> None:
    fleet.parts[name].kill()


def wait_for_end(part: Part) -> None:
    part.process.wait(5)


def test_a_dead_engine_is_started_again_until_its_budget_is_used_up(make_fleet, folder):
    fleet, notes = make_fleet(2, "engine-0", "engine-1")
    for number in (1, 2):
        die(fleet, "engine-0")
        look(fleet, status(folder, engine_0="ready", engine_1="ready"))
        assert "engine-0 was killed by SIGKILL" in notes[-1] and f"{number} of 2" in notes[-1]
        assert fleet.parts["engine-0"].returncode is None
    die(fleet, "engine-0")
    look(fleet, status(folder, engine_0="ready", engine_1="ready"))
    assert "used up" in notes[-1]
    assert fleet.names == ["engine-1"]


def test_the_run_ends_when_the_last_engine_is_given_up_unless_others_have_joined(make_fleet, folder):
    fleet, _ = make_fleet(1, "engine-0")
    die(fleet, "engine-0")
    look(fleet, status(folder, engine_0="ready"))
    die(fleet, "engine-0")
    look(fleet, status(folder, engine_0="ready", far_away="ready"))
    with pytest.raises(RunError, match="engine-0 was killed by SIGKILL"):
        look(fleet, status(folder, engine_0="quarantined", far_away="gone"))


def test_without_a_budget_the_first_dead_engine_ends_the_run(make_fleet, folder):
    fleet, _ = make_fleet(0, "engine-0", "engine-1")
    die(fleet, "engine-1")
    with pytest.raises(RunError, match="engine-1 was killed by SIGKILL"):
        look(fleet, status(folder, engine_0="ready", engine_1="ready"))


@pytest.mark.parametrize("state", ["gone dismissed", "draining"])
def test_an_engine_that_was_let_go_ends_and_is_not_started_again(make_fleet, folder, state):
    fleet, notes = make_fleet(0, "engine-0", "engine-1")
    part = fleet.parts["engine-1"]
    look(fleet, status(folder, engine_0="ready", engine_1=state))
    if state == "draining":
        assert part.returncode is None
        die(fleet, "engine-1")
    wait_for_end(part)
    look(fleet, status(folder, engine_0="ready", engine_1=state))
    assert notes == ["engine-1 has left the run"]
    assert fleet.names == list(fleet.parts) == ["engine-0"]


def test_an_engine_that_is_given_up_while_its_process_lives_is_killed_and_started_again(make_fleet, folder):
    fleet, notes = make_fleet(1, "engine-0")
    gone = status(folder, engine_0="gone")
    part = fleet.parts["engine-0"]
    look(fleet, gone)
    wait_for_end(part)
    look(fleet, gone)
    assert len(notes) == 2 and fleet.parts["engine-0"] is not part
    look(fleet, gone)  # the status still shows the one before
    assert len(notes) == 2 and fleet.parts["engine-0"].returncode is None


def test_requested_engines_are_started_once_and_never_under_a_name_that_is_taken(make_fleet, folder):
    fleet, notes = make_fleet(1, "engine-0")
    assert folder.request_engine(taken={"engine-0"}).name == "engine-1"
    assert folder.request_engine(taken={"engine-0"}).name == "engine-2"
    fleet.start_requested()
    fleet.start_requested()
    assert fleet.names == ["engine-0", "engine-1", "engine-2"] and len(notes) == 2


def test_engines_that_are_added_in_a_row_get_names_of_their_own_before_they_have_joined(
    make_fleet, folder, monkeypatch
):
    fleet, _ = make_fleet(0, "engine-0")
    monkeypatch.setattr(engines, "_status", lambda run: status(run, engine_0="ready"))
    monkeypatch.setattr(time, "sleep", lambda _: fleet.start_requested())  # the supervisor looks while they wait
    assert [engines.add_engine(folder), engines.add_engine(folder)] == ["engine-1", "engine-2"]
    assert fleet.names == ["engine-0", "engine-1", "engine-2"]


def test_a_part_that_does_not_listen_is_killed_when_it_is_asked_again_later(folder, monkeypatch):
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    part = Part("engine-0", process, folder.logs)
    part.ask_to_end()
    part.ask_to_end()
    assert part.returncode is None
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 60)
    part.ask_to_end()
    assert part.returncode == -9


def test_a_run_folder_that_goes_on_forgets_old_requests(folder):
    folder.request_engine(taken=set())
    (folder.path / "run.json").write_text(json.dumps({"model_dir": str(folder.path), "store_root": "/x"}))
    from polyrhythm.config import Config

    folder.reopen(Config(weights={"root": str(folder.path / "weights")}), 0)  # pyright: ignore
    assert folder.take_engine_requests() == []
