"""What becomes of a run that has finished. Runs that were killed are resumed in tests/chaos."""

import json
import shutil


def test_a_finished_run_can_be_given_more_steps_but_not_another_task(cli):
    first = cli.train(
        num_steps=2, training__schedule="cosine"
    )  # fewer than there are between checkpoints: the last step has one all the same
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
    assert (
        "'cosine' is planned over num_steps: with 3 instead of 2 the learning rate goes on along another" in more.output
    )
    a_new_run_begins_with_a_step_of_it(cli, more)


def a_new_run_begins_with_a_step_of_it(cli, earlier):
    mixed = cli.run("train", "--resume", str(earlier.run_dir), "--from", str(earlier.run_dir))
    assert mixed.returncode == 2 and "give one of them" in mixed.output
    arguments = cli.arguments(num_steps=1, algorithm__kl_coef=0.1, model="no/such-model", dtype="bfloat16")
    new = cli.run(*arguments, "--from", f"{earlier.run_dir}@2", "--with-optimizer")
    assert new.returncode == 0, new.output
    assert new.run_dir != earlier.run_dir and f"beginning with the weights of {earlier.run_dir}@2" in new.output
    initial = new.run_dir / "initial_model"
    assert json.loads((new.run_dir / "config.json").read_text())["model"] == str(initial)
    assert (initial / "tokenizer.json").exists() and (initial / "generation_config.json").exists()
    assert (initial / "model.safetensors").read_bytes() not in (earlier.weights(), new.weights())
    (row,) = new.metrics()
    assert row["kl/k1"] == 0, "the reference is what it began with"
    assert 0 < row["mismatch/logprob_abs_mean"] < 0.05, (
        "the trainer computes in bf16 with the numbers that the engine has"
    )
    exported = cli.run("export", f"{earlier.run_dir}", "--to", "taken")
    assert exported.returncode == 0 and "step 3 of" in exported.output, exported.output
    assert (cli.work_dir / "taken" / "model.safetensors").read_bytes() == earlier.weights()
