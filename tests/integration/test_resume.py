"""A killed run goes on from its last checkpoint and ends with the weights of the undisturbed run. More ways to die: tests/chaos."""

import signal


def test_a_run_whose_trainer_was_killed_is_resumed_to_the_same_weights(cli):
    flags = {"order": "problem", "num_steps": 6, "training__checkpoint_every": 1}
    undisturbed = cli.train(**flags)
    assert undisturbed.returncode == 0, undisturbed.output

    process = cli.start(cli.arguments(**flags))
    run = cli.wait_for(lambda: cli.newest_run() != undisturbed.run_dir and cli.newest_run(), "a new run folder")
    cli.wait_for_steps(2)
    cli.processes_of(run)["trainer"].send_signal(signal.SIGKILL)
    killed = cli.finish(process)
    assert killed.returncode == 1 and "trainer was killed by SIGKILL" in killed.output

    resumed = cli.run("train", "--resume", str(run), "--observe.view", "plain")
    assert resumed.returncode == 0, resumed.output
    assert "going on with" in resumed.output and "at step 1 " not in resumed.output
    assert resumed.run_dir == run
    assert [row["step"] for row in resumed.metrics()] == list(range(6))
    assert resumed.weights() == undisturbed.weights()


def test_a_finished_run_can_be_given_more_steps_but_not_another_task(cli):
    first = cli.train(num_steps=2, training__checkpoint_every=1)
    assert first.returncode == 0, first.output
    over = cli.run("train", "--resume", str(first.run_dir))
    assert over.returncode == 2 and "give a larger --num_steps" in over.output
    other = cli.run("train", "--resume", str(first.run_dir), "--training.learning_rate", "1")
    assert other.returncode == 2 and "training cannot change on --resume" in other.output
    more = cli.run("train", "--resume", str(first.run_dir), "--num_steps", "3", "--observe.view", "plain")
    assert more.returncode == 0, more.output
    assert [row["step"] for row in more.metrics()] == [0, 1, 2]
