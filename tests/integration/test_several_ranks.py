"""A trainer of two ranks, with real processes."""

from polyrhythm.chaos.plan import read_fault_log

FLAGS = {"order": "problem", "training__num_ranks": 2, "num_steps": 4}
KILL_THE_SECOND_RANK = """
[[fault]]
what = "kill"
where = "trainer-1"
step = 1
at = "reduce"
"""


def test_ranks_train_the_same_weights_in_both_schedules_also_when_one_is_killed_and_resumed(cli):
    sync = cli.train(**FLAGS, schedule="sync")
    assert sync.returncode == 0, sync.output
    assert {log.stem for log in (sync.run_dir / "logs").iterdir()} == {
        "conductor", "engine-0", "trainer-0", "trainer-1",
    }  # fmt: skip
    for row in sync.metrics():
        assert row["ranks/num"] == 2 and row["ranks/largest_share"] < 1, "both have trained"
        assert row["onpolicy/violations"] == 0
    (cli.work_dir / "plan.toml").write_text(KILL_THE_SECOND_RANK)
    broken = cli.run(*cli.arguments(**FLAGS, training__checkpoint_every=1), "--chaos", "plan.toml")
    assert [line["where"] for line in read_fault_log(broken.run_dir)] == ["trainer-1"]
    assert broken.returncode == 1 and "trainer-1 was killed by SIGKILL" in broken.output
    assert "trainer-0" not in broken.output, "the other rank fell because of it"
    resumed = cli.run("train", "--resume", str(broken.run_dir), "--observe.view", "plain")
    assert resumed.returncode == 0, resumed.output
    assert resumed.weights() == sync.weights() != (cli.model_dir / "model.safetensors").read_bytes()


def test_groups_go_to_the_rank_that_asks_and_a_run_goes_on_with_another_number_of_ranks(cli):
    two = cli.train(training__num_ranks=2, training__tokens_per_micro_batch=64, num_steps=2)
    assert two.returncode == 0, two.output
    three = cli.run("train", "--resume", str(two.run_dir), "--training.num_ranks", "3", "--num_steps", "3",
                    "--observe.view", "plain")  # fmt: skip
    assert three.returncode == 0, three.output
    assert [row["ranks/num"] for row in three.metrics()] == [2, 2, 3]
    for row in three.metrics():
        assert row["train/tokens"] == row["completion/tokens_mean"] * 6 * 4, "no group without variance in this task"
        assert row["train/ratio_abs_gap_max"] == 0 and row["mismatch/logprob_abs_mean"] < 1e-4
