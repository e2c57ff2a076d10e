"""Who is blamed when a run ends badly, with shell commands in place of conductor and trainer."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from polyrhythm.cluster import local
from polyrhythm.cluster.local import LocalRun
from polyrhythm.cluster.part import Part
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.conductor.cores import CorePlan
from polyrhythm.config import Config
from polyrhythm.errors import ConductorFailed, RunError
from polyrhythm.observe.view import NoView

FAILS = "echo polyrhythm: out of luck; exit 1"
FAILS_LATER = f"sleep 1; {FAILS}"
IS_KILLED = "kill -9 $$"
RUNS_ON = "exec sleep 60"
MISSES_THE_CONDUCTOR = f"echo polyrhythm: the conductor answered 503; exit {ConductorFailed.exit_code}"


@contextmanager
def run_of(folder: RunFolder, **commands: str) -> Iterator[LocalRun]:
    """A run whose parts are shell commands; those that end at once have ended."""
    run = LocalRun(folder, Config(), CorePlan(num_cores=2, engine=1, trainer=1))
    for name, command in commands.items():
        log = folder.logs / f"{name}.log"
        with open(log, "wb") as said:
            part = Part(name, subprocess.Popen(["sh", "-c", command], stdout=said), log)
        setattr(run, name, part)
        if command not in (RUNS_ON, FAILS_LATER):
            part.process.wait(10)
    try:
        yield run
    finally:
        for part in run.parts:
            part.kill()


@pytest.mark.parametrize(
    ("conductor", "trainer", "named"),
    [
        (FAILS, MISSES_THE_CONDUCTOR, ["conductor ended with exit code 1: out of luck"]),
        (FAILS_LATER, MISSES_THE_CONDUCTOR, ["conductor ended with exit code 1: out of luck"]),
        (IS_KILLED, MISSES_THE_CONDUCTOR, ["conductor was killed by SIGKILL"]),
        (FAILS, RUNS_ON, ["conductor ended with exit code 1: out of luck"]),
        (RUNS_ON, FAILS, ["trainer ended with exit code 1: out of luck"]),
        (RUNS_ON, IS_KILLED, ["trainer was killed by SIGKILL"]),
        (RUNS_ON, MISSES_THE_CONDUCTOR, ["trainer ended with exit code 4: the conductor answered 503"]),
        (FAILS, FAILS, ["conductor ended with exit code 1", "trainer ended with exit code 1"]),
        (FAILS, IS_KILLED, ["trainer was killed by SIGKILL", "conductor ended with exit code 1"]),
    ],
)
def test_a_part_that_fell_after_another_is_not_blamed(tmp_path, monkeypatch, conductor, trainer, named):
    monkeypatch.setattr(local, "SETTLE_S", 0.0)
    monkeypatch.setattr(local, "END_DEADLINE_S", 0.2 if conductor == RUNS_ON else 10.0)
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    with run_of(folder, conductor=conductor, trainer=trainer) as run, pytest.raises(RunError) as caught:
        run.watch(NoView())
    lines = str(caught.value).splitlines()
    assert len(lines) == len(named)
    assert all(line.startswith(start) for line, start in zip(lines, named, strict=True)), lines
