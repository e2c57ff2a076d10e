"""Elastic ranks with real processes and SIGKILL: the run goes on, every gradient is that of the undisturbed run.

With adam_beta1 = 0 the first moment in the checkpoint of a step is the step's gradient, divided and clipped.
"""

import pytest
import torch
from safetensors.torch import load_file

from polyrhythm.chaos.plan import read_fault_log
from polyrhythm.cluster.run_folder import RunFolder
from tests.chaos.test_chaos import fired, total, write_plan
from tests.integration.conftest import Cli, Outcome, fill_work_dir

NUM_STEPS = 5
FLAGS = {
    "order": "problem", "num_steps": NUM_STEPS, "training__checkpoint_every": 1, "training__keep_checkpoints": 9,
    "training__tokens_per_micro_batch": 64, "training__adam_beta1": 0.0, "training__learning_rate": 1e-2,
    "rollout__groups_per_step": 12, "training__optimizer_options": '{"eps": 1.0}', "training__max_grad_norm": 1e9,
}  # fmt: skip
"""With so large an eps a step is nearly proportional to its gradient: last-bit noise does not become whole steps."""
ELASTIC = {"training__num_ranks": 3, "training__elastic": None}


def arguments(cli: Cli, **flags) -> list[str]:
    given = cli.arguments(**{key: value for key, value in flags.items() if value is not None})
    return [*given, *(f"--{key.replace('__', '.')}" for key, value in flags.items() if value is None)]


def checkpoint(outcome: Outcome, step: int) -> dict[str, torch.Tensor]:
    assert outcome.run_dir is not None
    return load_file(outcome.run_dir / "checkpoints" / f"v{step:08d}" / "model.safetensors")


def flat(outcome: Outcome, step: int, prefix: str, suffix: str = "") -> torch.Tensor:
    tensors = checkpoint(outcome, step)
    names = sorted(name for name in tensors if name.startswith(prefix) and name.endswith(suffix))
    return torch.cat([tensors[name].flatten().double() for name in names])


def gradient(outcome: Outcome, step: int) -> torch.Tensor:
    return flat(outcome, step, "optimizer.", ".exp_avg")


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_model_dir) -> Outcome:
    """One rank, which nothing happens to."""
    outcome = Cli(fill_work_dir(tmp_path_factory.mktemp("one-rank")), tiny_model_dir).train(**FLAGS)
    assert outcome.returncode == 0, outcome.output
    return outcome


def assert_trained_alike(outcome: Outcome, undisturbed: Outcome) -> None:
    assert outcome.returncode == 0, outcome.output
    rows = outcome.metrics()
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    for metric in ("groups/replaced", "ledger/duplicates", "onpolicy/violations", "dispatch/retries"):
        assert total(outcome, metric) == 0, metric
    for row, expected in zip(rows, undisturbed.metrics(), strict=True):
        assert row["train/tokens"] == expected["train/tokens"], "every group counts once"
        assert row["groups/skipped"] == expected["groups/skipped"]
    for step in range(1, NUM_STEPS + 1):
        assert relative_error(gradient(outcome, step), gradient(undisturbed, step)) < 1e-6, step
    first, last = flat(undisturbed, 1, "policy."), flat(undisturbed, NUM_STEPS, "policy.")
    distance = float((last - first).norm())
    assert float((flat(outcome, NUM_STEPS, "policy.") - last).norm()) < 1e-3 * distance


def states(run) -> list[str]:
    return [rank.state for rank in RunFolder(run).admin().status().ranks]


def test_ranks_killed_after_two_groups_in_the_reduction_and_before_publication_cost_their_groups_alone(
    cli, undisturbed
):
    back = cli.work_dir / "back"
    plan = write_plan(
        cli,
        {"what": "kill", "where": "trainer-2", "step": 1, "at": "forward_backward", "nth": 3},
        {"what": "kill", "where": "trainer-1", "step": 2, "at": "reduce", "nth": 3},
        # In a step that waits for them, those that were started again join before the next one falls.
        {"what": "slow", "where": "trainer-0", "step": 3, "at": "forward_backward", "until": str(back)},
        {"what": "kill", "where": "trainer-0", "step": 3, "at": "publish"},
    )
    process = cli.start([*arguments(cli, **FLAGS, **ELASTIC), "--chaos", plan])
    run = cli.wait_for_steps(3)
    cli.wait_for(lambda: states(run) == ["training"] * 3, "three ranks in the middle of step 4")
    back.touch()
    outcome = cli.finish(process)
    faults = [("kill", "trainer-0"), ("kill", "trainer-1"), ("kill", "trainer-2"), ("slow", "trainer-0")]
    assert fired(outcome) == faults
    rows = outcome.metrics()
    assert [row["ranks/lost"] for row in rows[:4]] == [0, 1, 1, 1]
    again = [row["ranks/groups_again"] for row in rows[:4]]
    assert again[0] == 0 and 2 <= again[1] <= 4, "of the lost rank's groups those that it had received"
    assert again[2] in (4, 6), "all of its groups: it was adding up"
    assert again[3] == 0, "after the commit nothing is lost"
    assert rows[3]["ranks/num"] == 3, "two have joined in the middle of the step"
    assert_trained_alike(outcome, undisturbed)


def test_a_rank_joins_in_the_middle_of_a_step_in_which_another_is_killed(cli, undisturbed):
    answers_come = cli.work_dir / "answers_come"
    plan = write_plan(
        cli,
        {"what": "slow", "where": "engine-0", "step": 1, "until": str(answers_come), "times": 3},
        {"what": "kill", "where": "trainer-1", "step": 1, "at": "forward_backward", "nth": 2},
    )
    flags = (
        FLAGS | ELASTIC | {"training__num_ranks": 2, "conductor__request_deadline_s": 1000, "cluster__max_restarts": 0}
    )
    process = cli.start([*arguments(cli, **flags), "--chaos", plan])
    run = cli.wait_for_steps(1)
    cli.wait_for(lambda: read_fault_log(run), "the slow answer")
    added = cli.run("ranks", "add", "--run", str(run))
    assert "trainer-2 is being started" in added.output
    cli.wait_for(lambda: states(run) == ["training"] * 3, "the third rank")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1, "this was in the middle of step 2"
    answers_come.touch()
    cli.wait_for_steps(2)
    cli.run("ranks", "drain", "trainer-0", "--run", str(run))
    outcome = cli.finish(process)
    assert ("kill", "trainer-1") in fired(outcome)
    rows = outcome.metrics()
    assert rows[1]["ranks/lost"] == 1 and rows[1]["ranks/num"] == 2
    assert "cluster.max_restarts=0 are used up, it stays away" in outcome.output
    assert_trained_alike(outcome, undisturbed)
