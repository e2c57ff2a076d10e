"""A dead part ends the run quickly, by name, and leaves nothing behind; so does Ctrl-C."""

import signal
import time
from pathlib import Path

import psutil
import pytest

SOON_S = 60.0
"""Seconds on a machine that has nothing else to do; without the supervisor's care it would be the stall deadline, 600 s."""


def assert_nothing_left(cli, processes: dict[str, psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes.values(), timeout=60)
    assert not alive
    assert not cli.processes_of(cli.newest_run())
    assert not list(Path("/dev/shm").glob(f"polyrhythm-*-{cli.newest_run().name}"))


def started_run(cli, **flags):
    process = cli.start(cli.arguments(num_steps=1000, **flags))
    run = cli.wait_for_steps(1)
    processes = cli.processes_of(run)
    assert processes.keys() == {"engine-0", "conductor", "trainer"}
    for child in psutil.Process(process.pid).children(recursive=True):
        processes.setdefault(f"child-{child.pid}", child)
    assert len(processes) > 3, "reward workers are processes too"
    return process, processes


@pytest.mark.parametrize("part", ["engine-0", "conductor", "trainer"])
def test_a_killed_part_ends_the_run_soon_and_is_named(cli, part):
    process, processes = started_run(cli, cluster__max_restarts=0)
    killed_at = time.monotonic()
    processes[part].send_signal(signal.SIGKILL)
    outcome = cli.finish(process)
    assert time.monotonic() - killed_at < SOON_S
    assert outcome.returncode == 1
    assert f"{part} was killed by SIGKILL" in outcome.output
    assert outcome.output.count("(log: ") == 1, "it alone is named"
    assert_nothing_left(cli, processes)


def test_ctrl_c_ends_everything_cleanly_however_often_it_is_pressed(cli):
    process, processes = started_run(cli, training__checkpoint_every=1)
    cli.wait_for(lambda: list(cli.newest_run().glob("checkpoints/v*")), "a checkpoint")
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    outcome = cli.finish(process)
    assert not [name for name, part in processes.items() if part.is_running()], "it says that all have ended"
    assert outcome.returncode == 130
    assert "Traceback" not in outcome.output
    assert f"polyrhythm train --resume {cli.newest_run()}" in outcome.output
    assert_nothing_left(cli, processes)


def test_when_the_supervisor_is_killed_the_parts_leave_by_themselves(cli):
    process, processes = started_run(cli)
    process.kill()
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(processes.values(), timeout=60)
    assert not alive


@pytest.mark.parametrize("reward", ["raises_at_times", "hangs_at_times"])
def test_a_reward_that_fails_at_times_is_counted_and_the_run_goes_on(cli, reward):
    outcome = cli.train(reward__functions=f'["my_rewards:{reward}"]', reward__deadline_s=1, num_steps=2)
    assert outcome.returncode == 0, outcome.output
    excluded = sum(row["reward/excluded"] for row in outcome.metrics())
    assert 0 < excluded < 2 * 6 * 4
    assert "rewards that failed" in outcome.output
    log = (outcome.run_dir / "logs" / "conductor.log").read_text()
    assert " failed in step " in log
    assert ("in raises_at_times\n" in log) == (reward == "raises_at_times"), "the traceback of what was raised"
    assert log.count("Traceback") <= 2, "once per step"


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_a_reward_whose_column_is_missing_is_refused_before_anything_starts(cli, dry_run):
    (cli.work_dir / "picky.py").write_text("def score(completions, solution): return [1.0]\n")
    outcome = cli.run(*cli.arguments(reward__functions='["picky:score"]'), *dry_run)
    assert outcome.returncode == 2 and outcome.run_dir is None
    assert "reward 'picky:score' needs the column 'solution', and problem " in outcome.output
    assert "has only answer" in outcome.output


def test_a_reward_that_always_fails_ends_the_run_and_says_so(cli):
    outcome = cli.train(reward__functions='["my_rewards:always_raises"]')
    assert outcome.returncode == 1
    assert "conductor ended with exit code 1: every reward of step 1 failed" in outcome.output
    assert "no reward today" in outcome.output
    assert outcome.output.count("(log: ") == 1, "it alone is named"
