"""Policy, old policy and reference with real engines."""


def test_with_learning_rate_zero_ratio_and_kl_stay_exact_for_three_steps(cli):
    outcome = cli.train(training__learning_rate=0, algorithm__kl_coef=0.1)
    assert outcome.returncode == 0, outcome.output
    rows = outcome.metrics()
    assert len(rows) == 3
    for row in rows:
        assert row["train/tokens"] > 0, "with a KL term every group is trained on"
        assert row["train/ratio_abs_gap_max"] == 0 and row["train/clip_fraction"] == 0
        assert row["kl/k1"] == 0 and row["kl/k3"] == 0


def test_kl_is_zero_at_the_first_step_and_grows_from_there(cli):
    outcome = cli.train(training__learning_rate=1e-2, algorithm__kl_coef=0.1, algorithm__kl_estimator="k2")
    assert outcome.returncode == 0, outcome.output
    first, *rest = outcome.metrics()
    assert first["kl/k3"] == 0
    assert all(row["kl/k3"] > 1e-6 for row in rest)


def test_several_updates_in_a_step_move_the_ratio(cli):
    outcome = cli.train(training__updates_per_step=3, training__learning_rate=1e-2)
    assert outcome.returncode == 0, outcome.output
    assert max(row["train/ratio_abs_gap_max"] for row in outcome.metrics()) > 1e-4
    assert all(row["onpolicy/violations"] == 0 for row in outcome.metrics())
