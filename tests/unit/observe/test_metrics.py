"""The table of metrics."""

from pathlib import Path

from polyrhythm.observe import metrics
from polyrhythm.observe.activity import Activity
from polyrhythm.observe.metrics import METRICS, in_order, is_known, trainer_times

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_page_for_users_is_written_from_the_table():
    assert PAGE.read_text() == metrics.page() + "\n", "run: python -m polyrhythm.observe.metrics > docs/metrics.md"


def test_every_metric_says_what_it_is():
    for name, metric in METRICS.items():
        assert metric.unit and metric.meaning.endswith("."), name
        assert "|" not in metric.unit + metric.meaning + metric.when, f"{name}: it would end the cell of the page"


def test_a_name_that_is_not_in_the_table_is_not_known():
    assert is_known("reward/mean") and is_known("loss/of_my_own")
    assert not is_known("reward/median") and not is_known("loss")


def test_metrics_are_put_into_the_order_of_the_table_and_none_is_lost():
    shuffled = {"loss/own": 3.0, "time/step_s": 1.0, "reward/mean": 2.0}
    assert list(in_order(shuffled).items()) == [("reward/mean", 2.0), ("time/step_s", 1.0), ("loss/own", 3.0)]


def test_what_the_trainer_did_not_do_took_no_time():
    times = trainer_times({Activity.WAIT: 1.5, Activity.CHECKPOINT: 0.5})
    assert times["time/trainer_wait_s"] == 1.5 and times["time/trainer_checkpoint_s"] == 0.5
    assert times["time/trainer_publish_s"] == 0.0
    assert all(map(is_known, times))
