"""Who is blamed when a run ends badly, with shell commands in place of conductor and ranks."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from polyrhythm.cluster import local
from polyrhythm.cluster.local import LocalRun
from polyrhythm.cluster.process import ManagedProcess
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.conductor.engines.cores import CorePlan
from polyrhythm.config import Config
from polyrhythm.errors import AnotherFailed, RunError
from polyrhythm.observe.terminal.view import NoView

FAILS = "echo polyrhythm: out of luck; exit 1"
FAILS_LATER = f"sleep 1; {FAILS}"
IS_KILLED = "kill -9 $$"
RUNS_ON = "exec sleep 60"
FELL_AFTER = f"echo polyrhythm: the conductor answered 503; exit {AnotherFailed.exit_code}"


def start(folder: RunFolder, name: str, command: str) -> ManagedProcess:
    log = folder.logs / f"{name}.log"
    with open(log, "wb") as said:
        part = ManagedProcess(name, subprocess.Popen(["sh", "-c", command], stdout=said), log)
    if command not in (RUNS_ON, FAILS_LATER):
        part.process.wait(10)
    return part


@contextmanager
def run_of(folder: RunFolder, conductor: str, *ranks: str) -> Iterator[LocalRun]:
    """A run whose parts are shell commands; those that end at once have ended."""
    run = LocalRun(folder, Config(), CorePlan(num_cores=2, engine=1, trainer=1))
    run.conductor = start(folder, "conductor", conductor)
    run.ranks = [start(folder, f"trainer-{rank}", command) for rank, command in enumerate(ranks)]
    try:
        yield run
    finally:
        for part in run.parts:
            part.kill()


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
        (RUNS_ON, ["exit 0", FAILS], ["trainer-1 ended with exit code 1: out of luck"]),
    ],
)
def test_a_part_that_failed_after_another_is_not_blamed(tmp_path, monkeypatch, conductor, ranks, named):
    monkeypatch.setattr(local, "SETTLE_S", 0.0)
    monkeypatch.setattr(local, "END_DEADLINE_S", 0.2 if ranks == [FELL_AFTER] and conductor == RUNS_ON else 10.0)
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    with run_of(folder, conductor, *ranks) as run, pytest.raises(RunError) as caught:
        run.watch(NoView())
    lines = str(caught.value).splitlines()
    assert len(lines) == len(named)
    assert all(line.startswith(start) for line, start in zip(lines, named, strict=True)), lines
