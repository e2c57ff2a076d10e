"""What becomes of a run that has finished. Runs that were killed are resumed in tests/chaos."""

import shutil


def test_a_finished_run_can_be_given_more_steps_but_not_another_task(cli):
    first = cli.train(num_steps=2)  # fewer than there are between checkpoints: the last step has one all the same
    assert first.returncode == 0, first.output
    weights = first.weights()
    over = cli.run("train", "--resume", str(first.run_dir))
    assert over.returncode == 2 and "give a larger num_steps" in over.output
    other = cli.run("train", "--resume", str(first.run_dir), "--training.updates_per_step", "2")
    assert other.returncode == 2 and "training.updates_per_step cannot change on --resume" in other.output
    shutil.rmtree(first.run_dir / "model")
    saved = cli.run("train", "--resume", str(first.run_dir), "--observe.view", "plain")
    assert saved.returncode == 0 and "to save the model" in saved.output, saved.output
    assert saved.weights() == weights and len(saved.metrics()) == 2
    more = cli.run("train", "--resume", str(first.run_dir), "--num_steps", "3", "--observe.view", "plain")
    assert more.returncode == 0, more.output
    rows = more.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[2]["tokens/total_trained"] == sum(row["train/tokens"] for row in rows), "it goes on after a resume"
    assert rows[2]["tokens/total_generated"] > rows[1]["tokens/total_generated"] > rows[0]["tokens/total_generated"]
    assert "step 3/3" in more.output and "step 2/3" not in more.output, "the view shows what is new"
