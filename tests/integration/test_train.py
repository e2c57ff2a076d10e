"""Whole runs with real processes."""

import json
import math
from typing import Any

import pytest

from polyrhythm.observe.metrics import METRICS, SAMPLE_COLUMNS
from tests.integration.conftest import Cli, Outcome, fill_work_dir


@pytest.fixture(scope="module")
def train_once(tmp_path_factory, tiny_model_dir):
    """A run of its own folder for whoever looks at it, not for one test alone."""

    def train(**flags) -> Outcome:
        outcome = Cli(fill_work_dir(tmp_path_factory.mktemp("run")), tiny_model_dir).train(**flags)
        assert outcome.returncode == 0, outcome.output
        return outcome

    return train


@pytest.fixture(scope="module")
def as_it_comes(train_once) -> Outcome:
    functions = ["my_rewards:many_low_bytes", "my_rewards.py:tells"]
    return train_once(reward__functions=json.dumps(functions), reward__weights="[1.0, 0.0]")


@pytest.fixture(scope="module")
def periodic(train_once) -> Outcome:
    return train_once(order="problem", schedule="periodic")


def test_sync_and_periodic_train_the_same_weights_byte_for_byte(cli, periodic):
    sync = cli.train(order="problem", schedule="sync")
    assert sync.returncode == 0, sync.output
    assert periodic.weights() == sync.weights()
    initial = (cli.model_dir / "model.safetensors").read_bytes()
    assert periodic.weights() != initial
    assert sum(row["groups/skipped"] for row in periodic.metrics()) < 6 * 3, "something must have been trained on"


def test_every_step_logs_that_it_was_on_policy_and_how_far_engine_and_trainer_agree(as_it_comes):
    rows = as_it_comes.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["onpolicy/violations"] == 0
        assert row["mismatch/logprob_abs_mean"] < 1e-4
        assert 0 < row["mismatch/logprob_abs_max"] < 1e-3, "exactly zero would mean that nothing was compared"
        assert row["train/ratio_abs_gap_max"] == 0
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))


def test_every_step_logs_all_that_the_table_promises(as_it_comes, periodic):
    always = {name for name, metric in METRICS.items() if not metric.when}
    for row in as_it_comes.metrics() + periodic.metrics():
        assert always <= row.keys()
        assert "reward/accuracy" not in row, "this task does not say what is correct"
        in_the_order_of_the_table = [name for name in METRICS if name in row]
        assert [name for name in row if name in METRICS] == in_the_order_of_the_table


def test_epochs_lengths_and_tokens_are_counted(as_it_comes):
    rows = as_it_comes.metrics()
    assert [row["data/epoch"] for row in rows] == [6 / 16, 12 / 16, 18 / 16], "six of sixteen problems at each step"
    for row in rows:
        assert 1 <= row["completion/tokens_min"] <= row["completion/tokens_mean"] <= row["completion/tokens_max"] <= 12
        assert abs(row["train/loss"]) < 1
    assert rows[-1]["tokens/total_generated"] == sum(row["completion/tokens_mean"] for row in rows) * 6 * 4
    assert rows[-1]["tokens/total_trained"] == sum(row["train/tokens"] for row in rows) > 0


def test_a_run_leaves_metrics_samples_logs_and_the_resolved_configuration(as_it_comes):
    run = as_it_comes.run_dir
    assert json.loads((run / "config.json").read_text())["num_steps"] == 3
    samples = samples_of(as_it_comes)
    assert len(samples) == 3 * 4 and all(sample.keys() == SAMPLE_COLUMNS.keys() for sample in samples)
    assert all(sample["columns"].keys() == {"answer"} for sample in samples)
    assert {log.stem for log in (run / "logs").iterdir()} == {"conductor", "engine-0", "trainer"}
    assert (run / "tokens.json").stat().st_mode & 0o077 == 0
    token = json.loads((run / "tokens.json").read_text())["admin"]
    assert not any(token in log.read_text() for log in (run / "logs").iterdir())


def test_what_each_reward_function_says_and_logs_is_in_metrics_and_samples(as_it_comes):
    rows = as_it_comes.metrics()
    assert [row["reward_extra/step"] for row in rows] == [0, 1, 2]
    assert [row["reward/many_low_bytes/mean"] for row in rows] == [row["reward/mean"] for row in rows]
    assert all(row["reward/tells/mean"] > 0 for row in rows)
    for sample in samples_of(as_it_comes):
        assert sample["extra"] == {"first_letter": sample["completion"][:1]}
        assert (sample["scores"]["tells"] is None) == (sample["finish_reason"] == "stop")
        assert sample["scores"]["many_low_bytes"] == sample["reward"]
    functions = json.loads((as_it_comes.run_dir / "config.json").read_text())["reward"]["functions"]
    assert functions[1] == f"{as_it_comes.run_dir.parents[1]}/my_rewards.py:tells", "found by whoever goes on with it"


def samples_of(outcome: Outcome) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (outcome.run_dir / "samples.jsonl").read_text().splitlines()]


def test_two_engines_and_one_train_the_same_weights_byte_for_byte(cli, periodic):
    two = cli.train(order="problem", cluster__num_engines=2)
    assert two.returncode == 0, two.output
    assert two.weights() == periodic.weights()


def test_the_saved_configuration_of_a_run_repeats_it_byte_for_byte(cli, periodic):
    again = cli.run("train", str(periodic.run_dir / "config.json"))
    assert again.returncode == 0, again.output
    assert (again.run_dir / "config.json").read_text() == (periodic.run_dir / "config.json").read_text()
    assert again.weights() == periodic.weights()
