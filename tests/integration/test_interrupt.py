"""Ctrl-C keeps the last finished step, and the run goes on from there to the same weights."""

import signal

import pytest

from polyrhythm.chaos.plan import read_fault_log
from tests.integration.conftest import Cli, Outcome

FLAGS = {"order": "problem", "num_steps": 4, "training__checkpoint_every": 100}
SLOW = '[[fault]]\nwhat = "slow"\nwhere = "engine-0"\nstep = {step}\nfor_s = 300\n'


def interrupted_in(cli: Cli, step: int, number: signal.Signals = signal.SIGINT, **flags) -> Outcome:
    """A run that gets a signal in the middle of a step, whose first answer does not come."""
    (cli.work_dir / "plan.toml").write_text(SLOW.format(step=step))
    process = cli.start([*cli.arguments(**(FLAGS | flags)), "--chaos", "plan.toml"])
    cli.wait_for(lambda: (run := cli.newest_run()) and read_fault_log(run), "the answer that does not come")
    run = cli.newest_run()
    processes = cli.processes_of(run)
    process.send_signal(number)
    outcome = cli.finish(process)
    assert outcome.returncode == 130 and "Traceback" not in outcome.output, outcome.output
    assert len(processes) >= 3 and not cli.processes_of(run), "no process is left"
    return outcome


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_was_interrupted_goes_on_from_its_last_finished_step_to_the_same_weights(cli, number):
    broken = interrupted_in(cli, step=2, number=number)
    assert f"step 2 of 4 is kept: polyrhythm train --resume {broken.run_dir}" in broken.output
    again = cli.run("train", "--resume", str(broken.run_dir), "--observe.view", "plain")
    assert again.returncode == 0 and "at step 3 of 4" in again.output, again.output
    assert [row["step"] for row in again.metrics()] == [1, 2, 3, 4]
    undisturbed = cli.train(**FLAGS)
    assert undisturbed.run_dir != broken.run_dir
    assert again.weights() == undisturbed.weights()


def test_before_the_first_finished_step_there_is_nothing_to_go_on_from(cli):
    broken = interrupted_in(cli, step=0)
    assert "no step was finished: there is nothing to go on from" in broken.output
    assert "--resume" not in broken.output


def test_who_wants_no_checkpoints_is_told_so(cli):
    broken = interrupted_in(cli, step=1, training__checkpoint_every=0)
    assert "there is no checkpoint to go on from: training.checkpoint_every=0 writes none" in broken.output
    assert not (broken.run_dir / "checkpoints").exists()
