"""The elastic ranks of a machine, with processes that end as they are told in place of ranks."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from polyrhythm.cluster.fleet.rank_processes import RankProcesses
from polyrhythm.cluster.launcher import ProcessSpec, RunProcess
from polyrhythm.cluster.local_processes import LocalLauncher
from polyrhythm.cluster.run_folder import RANK, RunFolder
from polyrhythm.config import load_config
from polyrhythm.errors import RunError, UserError
from tests.statuses import make_rank, make_status

CONFIG = load_config([], {"training": {"num_ranks": 2, "elastic": True}})


class EndingLauncher:
    """Its processes end with the next of these exit codes, and have ended when they are given back."""

    def __init__(self, folder: RunFolder, *exit_codes: int):
        self.folder = folder
        self.exit_codes = list(exit_codes)

    def start(self, spec: ProcessSpec) -> RunProcess:
        ends = f"import sys; print('last words'); sys.exit({self.exit_codes.pop(0)})"
        process = LocalLauncher(self.folder).start(replace(spec, command=[sys.executable, "-S", "-c", ends]))
        process.end(60.0)
        return process

    def close(self) -> None: ...


class Folder(RunFolder):
    """A conductor that hears whatever it is told."""

    told: list[str]

    def config(self):
        return CONFIG

    def admin(self, deadline_s: float = 0.0):
        return self

    def rank_ended(self, name: str) -> None:
        self.told.append(name)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path)
    folder.told = []
    folder.logs.mkdir()
    folder.processes.mkdir()
    return folder


def started(folder: Folder, *exit_codes: int, max_restarts: int = 1) -> tuple[RankProcesses, list[str]]:
    notes: list[str] = []
    ranks = RankProcesses(folder, EndingLauncher(folder, *exit_codes), 1, max_restarts, notes.append)
    ranks.start_first(["trainer-0"])
    return ranks, notes


def test_a_rank_that_was_let_go_stays_away_and_one_that_died_is_started_again(folder):
    ranks, notes = started(folder, 1, 0)
    status = make_status(ranks=[make_rank("trainer-1")])
    ranks.reconcile(ranks.ended(), status)
    assert folder.told == ["trainer-0"] and "it is started again, 1 of 1" in notes[-1]
    ranks.reconcile(ranks.ended(), status)
    assert not ranks.processes and notes[-1] == "trainer-0 has left the run"


def test_when_no_rank_is_left_anywhere_the_last_words_of_the_last_one_end_the_run(folder):
    ranks, _ = started(folder, 1, max_restarts=0)
    with pytest.raises(RunError, match="trainer-0 ended with exit code 1: last words"):
        ranks.reconcile(ranks.ended(), make_status(ranks=[]))


def test_a_mistake_of_the_user_ends_the_run_before_its_first_step_is_finished(folder):
    ranks, _ = started(folder, 2)
    with pytest.raises(UserError, match="last words"):
        ranks.reconcile(ranks.ended(), make_status())


def test_a_mistake_that_shows_later_keeps_that_rank_away_and_is_not_called_a_restart(folder):
    ranks, notes = started(folder, 2)
    ranks.reconcile(ranks.ended(), make_status(num_finished_steps=1))
    assert not ranks.processes and "it would fail in the same way again, so it stays away" in notes[-1]


def test_a_rank_that_was_asked_for_and_has_no_device_changes_nothing(folder):
    ranks, notes = started(folder, 0)
    ranks._devices = SimpleNamespace(kind="cuda", found=SimpleNamespace(devices=["only one"]))  # pyright: ignore
    folder.request(RANK, taken={"trainer-0"})
    ranks.start_requested()
    assert "trainer-1 was asked for and is not started: trainer-1 would need a device of its own" in notes[-1]


def test_the_run_is_done_when_the_model_is_saved_be_it_by_a_rank_of_another_machine(folder):
    ranks, _ = started(folder, 0)
    finished = make_status(num_finished_steps=20, ranks=[make_rank("trainer-1")])
    ranks.reconcile(ranks.ended(), finished)
    assert not ranks.processes and not ranks.is_done(finished), "the rank from elsewhere still writes it"
    folder.trained_model.mkdir(parents=True)
    assert ranks.is_done(finished)
