"""Ctrl-C keeps the last finished step, and the run goes on from there to the same weights."""

import signal
from subprocess import Popen

import pytest

from polyrhythm.chaos.plan import read_fault_log
from polyrhythm.weights.snapshot import newest_whole_version
from tests.integration.conftest import Cli, Outcome

FLAGS = {
    "order": "problem", "num_steps": 4, "training__checkpoint_every": 100, "training__schedule": "linear",
    "training__optimizer": "torch.optim:SGD", "training__optimizer_options": '{"momentum": 0.9}',
}  # fmt: skip
SLOW = '[[fault]]\nwhat = "slow"\nwhere = "engine-0"\nstep = {step}\nfor_s = 300\n'


def run_within(cli: Cli, step: int, **flags) -> Popen[str]:
    """A run in the middle of a step, whose first answer does not come."""
    (cli.work_dir / "plan.toml").write_text(SLOW.format(step=step))
    process = cli.start([*cli.arguments(**(FLAGS | flags)), "--chaos", "plan.toml"])
    cli.wait_for(lambda: (run := cli.newest_run()) and read_fault_log(run), "the answer that does not come")
    return process


def interrupted_in(
    cli: Cli, step: int, number: signal.Signals = signal.SIGINT, killed: str | None = None, **flags
) -> Outcome:
    """A run that gets a signal in the middle of a step, or one of its parts is killed there."""
    process = run_within(cli, step, **flags)
    run = cli.newest_run()
    processes = cli.processes_of(run)
    if killed:
        processes[killed].kill()
    else:
        process.send_signal(number)
    outcome = cli.finish(process)
    assert outcome.returncode == (1 if killed else 130) and "Traceback" not in outcome.output, outcome.output
    assert len(processes) >= 3 and not cli.processes_of(run), "no process is left"
    return outcome


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_was_interrupted_goes_on_from_its_last_finished_step_to_the_same_weights(cli, number):
    broken = interrupted_in(cli, step=2, number=number)
    assert f"step 2 of 4 is kept: polyrhythm train --resume {broken.run_dir}" in broken.output
    assert broken.output.endswith("interrupted: all processes have ended\n")
    assert (broken.run_dir / "logs" / "trainer.log").read_text().endswith("interrupted\n"), "it speaks for itself"
    again = cli.run("train", "--resume", str(broken.run_dir), "--observe.view", "plain")
    assert again.returncode == 0 and "at step 3 of 4" in again.output, again.output
    assert [row["step"] for row in again.metrics()] == [1, 2, 3, 4]
    undisturbed = cli.train(**FLAGS)
    assert undisturbed.run_dir != broken.run_dir
    assert again.weights() == undisturbed.weights()


def test_a_run_whose_conductor_was_killed_keeps_its_last_finished_step(cli):
    broken = interrupted_in(cli, step=2, killed="conductor")
    assert "conductor was killed by SIGKILL" in broken.output
    assert f"step 2 of 4 is kept: polyrhythm train --resume {broken.run_dir}" in broken.output


def test_the_last_finished_step_is_kept_though_nobody_reads_the_output_any_more(cli):
    process = run_within(cli, step=2)
    process.stdout.close()  # pyright: ignore
    process.send_signal(signal.SIGINT)
    process.wait(300)
    assert newest_whole_version(cli.newest_run() / "checkpoints") == 2
    assert not cli.processes_of(cli.newest_run()), "no process is left"


def test_before_the_first_finished_step_there_is_nothing_to_go_on_from(cli):
    broken = interrupted_in(cli, step=0)
    assert "no step was finished: there is nothing to go on from" in broken.output
    assert "--resume" not in broken.output


def test_who_wants_no_checkpoints_is_told_so(cli):
    broken = interrupted_in(cli, step=1, training__checkpoint_every=0)
    assert "there is no checkpoint to go on from: training.checkpoint_every=0 writes none" in broken.output
    assert not (broken.run_dir / "checkpoints").exists()
