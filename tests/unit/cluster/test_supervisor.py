"""Who is blamed when a run ends badly, with shell commands in place of conductor and ranks."""

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from polyrhythm.cluster import supervisor
from polyrhythm.cluster.launcher import ProcessSpec
from polyrhythm.cluster.local_processes import LocalLauncher, LocalProcess
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.cluster.supervisor import Supervisor
from polyrhythm.conductor.engines.cores import CorePlan
from polyrhythm.config import Config, TrainingConfig, load_config
from polyrhythm.errors import AnotherFailed, RunError, UserError
from polyrhythm.observe.terminal.view import NoView
from polyrhythm.weights import snapshot

FAILS = "echo polyrhythm: out of luck; exit 1"
MISTAKEN = f"echo polyrhythm: model x cannot be run; exit {UserError.exit_code}"
FAILS_LATER = f"sleep 1; {FAILS}"
IS_KILLED = "kill -9 $$"
RUNS_ON = "exec sleep 60"
FELL_AFTER = f"echo polyrhythm: the conductor answered 503; exit {AnotherFailed.exit_code}"


def start(folder: RunFolder, name: str, command: str) -> LocalProcess:
    process = LocalLauncher(folder).start(ProcessSpec(name, "trainer", ["sh", "-c", command]))
    if command not in (RUNS_ON, FAILS_LATER):
        process.process.wait(60)
    return process


@contextmanager
def run_of(folder: RunFolder, conductor: str, *ranks: str) -> Iterator[Supervisor]:
    """A run whose processes are shell commands; those that end at once have ended."""
    run = Supervisor(folder, Config(), CorePlan(num_cores=2, engine=1, trainer=1), LocalLauncher(folder))
    run.conductor = start(folder, "conductor", conductor)
    run.ranks = [start(folder, f"trainer-{rank}", command) for rank, command in enumerate(ranks)]
    try:
        yield run
    finally:
        for process in run.processes:
            process.kill()


@pytest.mark.parametrize(
    ("conductor", "ranks", "named"),
    [
        (FAILS, [FELL_AFTER], ["conductor ended with exit code 1: out of luck"]),
        (FAILS_LATER, [FELL_AFTER], ["conductor ended with exit code 1: out of luck"]),
        (IS_KILLED, [FELL_AFTER], ["conductor was killed by SIGKILL"]),
        (FAILS, [RUNS_ON], ["conductor ended with exit code 1: out of luck"]),
        (RUNS_ON, [FAILS], ["trainer-0 ended with exit code 1: out of luck"]),
        (RUNS_ON, [IS_KILLED], ["trainer-0 was killed by SIGKILL"]),
        (RUNS_ON, [FELL_AFTER], ["trainer-0 ended with exit code 4: the conductor answered 503"]),
        (FAILS, [FAILS], ["conductor ended with exit code 1", "trainer-0 ended with exit code 1"]),
        (FAILS, [IS_KILLED], ["trainer-0 was killed by SIGKILL", "conductor ended with exit code 1"]),
        (RUNS_ON, [FELL_AFTER, IS_KILLED], ["trainer-1 was killed by SIGKILL"]),
        (RUNS_ON, [FELL_AFTER, FAILS_LATER], ["trainer-1 ended with exit code 1: out of luck"]),
        (FAILS, [FELL_AFTER, FELL_AFTER], ["conductor ended with exit code 1: out of luck"]),
        (FAILS, [MISTAKEN, IS_KILLED], ["trainer-0 ended with exit code 2: model x cannot be run"]),
        (RUNS_ON, ["exit 0", FAILS], ["trainer-1 ended with exit code 1: out of luck"]),
    ],
)
def test_a_process_that_failed_after_another_is_not_blamed(tmp_path, monkeypatch, conductor, ranks, named):
    monkeypatch.setattr(supervisor, "SETTLE_S", 0.0)
    monkeypatch.setattr(supervisor, "END_DEADLINE_S", 0.2 if ranks == [FELL_AFTER] and conductor == RUNS_ON else 10.0)
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    with run_of(folder, conductor, *ranks) as run, pytest.raises((RunError, UserError)) as caught:
        run.watch(NoView())
    lines = str(caught.value).splitlines()
    assert len(lines) == len(named)
    assert isinstance(caught.value, UserError) is (MISTAKEN in (conductor, *ranks))
    assert all(line.startswith(start) for line, start in zip(lines, named, strict=True)), lines


def test_a_second_ctrl_c_ends_processes_that_do_not_listen_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "model_dir", tmp_path)
    monkeypatch.setattr(RunFolder, "remove_snapshots", lambda self: None)
    monkeypatch.setattr(snapshot, "MIN_WRITING_DEADLINE_S", 3600.0)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    deaf = ["sh", "-c", "trap '' TERM; echo deaf; while true; do sleep 0.1; done"]
    launcher = LocalLauncher(folder)
    run = Supervisor(folder, Config(), CorePlan(num_cores=2, engine=1, trainer=1), launcher)
    run.conductor = launcher.start(ProcessSpec("conductor", "conductor", deaf))
    run.ranks = [launcher.start(ProcessSpec("trainer", "trainer", deaf))]
    while not all(process.log.read_text() for process in run.processes):
        time.sleep(0.01)
    said = []

    def note(line: str) -> None:
        said.append(line)
        threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()

    run.note = note
    run.close(is_interrupted=True)
    assert [process.returncode for process in run.processes] == [-signal.SIGKILL] * 2
    assert said == ["ending, and keeping the last finished step; Ctrl-C again ends at once"]


@pytest.fixture
def ending_folder(tmp_path, monkeypatch) -> RunFolder:
    """Of a run that is about to be closed: it has a small model and no snapshots."""
    monkeypatch.setattr(RunFolder, "model_dir", tmp_path)
    monkeypatch.setattr(RunFolder, "remove_snapshots", lambda self: None)
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    return folder


class ClosedView(NoView):
    """Its terminal is gone."""

    def note(self, line: str) -> None:
        raise BrokenPipeError


def test_every_process_is_asked_to_end_though_nobody_reads_what_is_said(ending_folder):
    with run_of(ending_folder, RUNS_ON, RUNS_ON) as run:
        run.view = ClosedView()
        run.close(is_interrupted=True)
        assert [process.returncode for process in run.processes] == [-signal.SIGTERM] * 2
    assert "keeping the last finished step" in (ending_folder.logs / "supervisor.log").read_text()


def test_of_shards_the_last_finished_step_is_not_promised(ending_folder):
    with run_of(ending_folder, RUNS_ON, RUNS_ON, RUNS_ON) as run:
        run.config = Config(training=TrainingConfig(num_ranks=2, parallel="shard"))
        run.close(is_interrupted=True)
    assert "ending, and keeping finished checkpoints;" in (ending_folder.logs / "supervisor.log").read_text()


@pytest.mark.parametrize(
    ("num_finished", "checkpoint_every", "num_waits"),
    [(0, 1, 1), (1, 0, 1), (1, 1, 2), (Config().num_steps, 0, 2)],
)
def test_the_long_wait_is_for_a_writer_that_has_something_to_save(
    ending_folder, monkeypatch, num_finished, checkpoint_every, num_waits
):
    (ending_folder.path / "metrics.jsonl").write_text("{}\n" * num_finished)
    waits: list[float] = []
    with run_of(ending_folder, RUNS_ON, RUNS_ON) as run:
        run.config = load_config([], {"training": {"checkpoint_every": checkpoint_every}})
        monkeypatch.setattr(run, "_wait_for", lambda _, deadline_s: waits.append(deadline_s))
        run.close()
    assert waits == [supervisor.END_DEADLINE_S, snapshot.MIN_WRITING_DEADLINE_S][:num_waits]


def test_a_process_that_the_kernel_holds_does_not_keep_the_others_alive(ending_folder, monkeypatch, caplog):
    with run_of(ending_folder, RUNS_ON, RUNS_ON) as run:
        held = run.ranks[0]
        assert isinstance(held, LocalProcess)

        def wait(timeout: float) -> int:
            raise subprocess.TimeoutExpired("held", timeout)

        with monkeypatch.context() as patch:
            patch.setattr(held.process, "wait", wait)
            run.close()
        assert run.conductor is not None and run.conductor.returncode == -signal.SIGTERM
        assert f"trainer-0 (pid {held.process.pid}) has not ended" in caplog.text
