"""The engines of a machine, with short-lived processes in place of engines."""

import json
import sys
import time
from dataclasses import replace

import pytest

from polyrhythm.cli import engines as command
from polyrhythm.cluster.fleet.engine_processes import EngineProcesses
from polyrhythm.cluster.launcher import ProcessSpec, RunProcess
from polyrhythm.cluster.local_processes import LocalLauncher
from polyrhythm.cluster.run_folder import ENGINE, RunFolder
from polyrhythm.errors import RunError, UserError
from polyrhythm.observe.status import RunStatus
from tests.statuses import make_engine, make_status

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.processes.mkdir()
    return folder


class SleepingLauncher:
    """Starts processes that only sleep; each announces an address of its own."""

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self.started: list[RunProcess] = []

    def start(self, spec: ProcessSpec) -> RunProcess:
        process = LocalLauncher(self.folder).start(replace(spec, command=SLEEP))
        self.started.append(process)
        self.folder.announce(spec.name, f"http://{spec.name}/{len(self.started)}")
        return process


@pytest.fixture
def launcher(folder):
    launcher = SleepingLauncher(folder)
    yield launcher
    for process in launcher.started:
        process.kill()


@pytest.fixture
def make_engines(folder, launcher):
    def make(max_restarts: int, *names: str) -> tuple[EngineProcesses, list[str]]:
        notes: list[str] = []
        engines = EngineProcesses(folder, launcher, 1, max_restarts, notes.append)
        engines.start_first(names)
        return engines, notes

    return make


def status(folder: RunFolder, **states: str) -> RunStatus:
    engines = []
    for name, state in states.items():
        name = name.replace("_", "-")
        state, _, dismissed = state.partition(" ")
        url = folder.url(name) or "http://elsewhere"
        engines.append(make_engine(name, state, url=url, is_dismissed=bool(dismissed), policy_version=0))
    return make_status(engines=engines)


def look(engines: EngineProcesses, seen: RunStatus) -> None:
    engines.reconcile(engines.ended(), seen)


def die(engines: EngineProcesses, name: str) -> None:
    engines.processes[name].kill()


def wait_for_end(process: RunProcess) -> None:
    process.end(deadline_s=60)


def test_a_dead_engine_is_started_again_until_its_budget_is_used_up(make_engines, folder):
    engines, notes = make_engines(2, "engine-0", "engine-1")
    for number in (1, 2):
        die(engines, "engine-0")
        look(engines, status(folder, engine_0="ready", engine_1="ready"))
        assert "engine-0 was killed by SIGKILL" in notes[-1] and f"{number} of 2" in notes[-1]
        assert engines.processes["engine-0"].returncode is None
    die(engines, "engine-0")
    look(engines, status(folder, engine_0="ready", engine_1="ready"))
    assert "used up" in notes[-1]
    assert engines.names == ["engine-1"]


def test_the_run_ends_when_the_last_engine_is_given_up_unless_others_have_joined(make_engines, folder):
    engines, _ = make_engines(1, "engine-0")
    die(engines, "engine-0")
    look(engines, status(folder, engine_0="ready"))
    die(engines, "engine-0")
    look(engines, status(folder, engine_0="ready", far_away="ready"))
    with pytest.raises(RunError, match="engine-0 was killed by SIGKILL"):
        look(engines, status(folder, engine_0="quarantined", far_away="gone"))


def test_without_a_budget_the_first_dead_engine_ends_the_run(make_engines, folder):
    engines, _ = make_engines(0, "engine-0", "engine-1")
    die(engines, "engine-1")
    with pytest.raises(RunError, match="engine-1 was killed by SIGKILL"):
        look(engines, status(folder, engine_0="ready", engine_1="ready"))


@pytest.mark.parametrize("state", ["gone dismissed", "draining"])
def test_an_engine_that_was_let_go_ends_and_is_not_started_again(make_engines, folder, state):
    engines, notes = make_engines(0, "engine-0", "engine-1")
    process = engines.processes["engine-1"]
    look(engines, status(folder, engine_0="ready", engine_1=state))
    if state == "draining":
        assert process.returncode is None
        die(engines, "engine-1")
    wait_for_end(process)
    look(engines, status(folder, engine_0="ready", engine_1=state))
    assert notes == ["engine-1 has left the run"]
    assert engines.names == list(engines.processes) == ["engine-0"]


def test_an_engine_that_is_given_up_while_its_process_lives_is_killed_and_started_again(make_engines, folder):
    engines, notes = make_engines(1, "engine-0")
    gone = status(folder, engine_0="gone")
    process = engines.processes["engine-0"]
    look(engines, gone)
    wait_for_end(process)
    look(engines, gone)
    assert len(notes) == 2 and engines.processes["engine-0"] is not process
    look(engines, gone)  # the status still shows the one before
    assert len(notes) == 2 and engines.processes["engine-0"].returncode is None


def test_requested_engines_are_started_once_and_never_under_a_name_that_is_taken(make_engines, folder):
    engines, notes = make_engines(1, "engine-0")
    assert folder.request(ENGINE, taken={"engine-0"}).name == "engine-1"
    assert folder.request(ENGINE, taken={"engine-0"}).name == "engine-2"
    engines.start_requested()
    engines.start_requested()
    assert engines.names == ["engine-0", "engine-1", "engine-2"] and len(notes) == 2


def test_engines_that_are_added_in_a_row_get_names_of_their_own_before_they_have_joined(
    make_engines, folder, monkeypatch
):
    engines, _ = make_engines(0, "engine-0")
    monkeypatch.setattr(command, "status_of", lambda run: status(run, engine_0="ready"))
    monkeypatch.setattr(time, "sleep", lambda _: engines.start_requested())  # the supervisor looks while they wait
    assert [command.add_engine(folder), command.add_engine(folder)] == ["engine-1", "engine-2"]
    assert engines.names == ["engine-0", "engine-1", "engine-2"]


def end_by_mistake(engines: EngineProcesses, folder: RunFolder, name: str) -> None:
    says_so = f"echo \"polyrhythm: model='x' cannot be run: use another\"; exit {UserError.exit_code}"
    mistaken = LocalLauncher(folder).start(ProcessSpec(name, "engine", ["sh", "-c", says_so]))
    wait_for_end(mistaken)
    engines.processes[name] = mistaken


def test_a_mistake_of_the_user_ends_the_run_at_once_with_its_message(make_engines, folder, launcher):
    engines, notes = make_engines(3, "engine-0", "engine-1")
    end_by_mistake(engines, folder, "engine-1")
    with pytest.raises(UserError, match=r"engine-1 ended with exit code 2: model='x' cannot be run: use another"):
        look(engines, status(folder, engine_0="ready"))
    assert len(launcher.started) == 2 and not notes, "nothing was started again"


@pytest.mark.parametrize("is_late", [True, False])
def test_a_mistake_of_one_engine_does_not_end_a_run_that_others_serve(make_engines, folder, launcher, is_late):
    engines, notes = make_engines(3, "engine-0", *([] if is_late else ["engine-1"]))
    if is_late:
        engines.start("engine-1")
    else:
        look(engines, status(folder, engine_0="ready", engine_1="ready"))
    end_by_mistake(engines, folder, "engine-1")
    look(engines, status(folder, engine_0="loading", engine_1="gone"))
    assert engines.names == ["engine-0"] and len(launcher.started) == 2, "it is not started again"
    assert len(notes) == 1 and "cannot be run: use another" in notes[0] and "stays away" in notes[0]


def test_a_mistake_of_a_late_engine_ends_a_run_that_no_other_serves(make_engines, folder):
    engines, _ = make_engines(3, "engine-0")
    engines.start("engine-1")
    end_by_mistake(engines, folder, "engine-1")
    with pytest.raises(UserError, match="engine-1 ended with exit code 2"):
        look(engines, status(folder, engine_0="quarantined"))


def test_a_run_folder_that_goes_on_forgets_old_requests(folder):
    folder.request(ENGINE, taken=set())
    (folder.path / "run.json").write_text(json.dumps({"model_dir": str(folder.path), "store_root": "/x"}))
    from polyrhythm.config import Config

    folder.reopen(Config(weights={"root": str(folder.path / "weights")}), 0)  # pyright: ignore
    assert folder.take_requests(ENGINE) == []
