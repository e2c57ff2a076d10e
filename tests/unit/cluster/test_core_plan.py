import pytest

from polyrhythm.cluster.cores import cores_follow_demand, plan_threads
from polyrhythm.config import load_config


@pytest.mark.parametrize(
    ("cores", "num_engines", "trainer", "engine"),
    [(1, 1, 1, 1), (2, 1, 1, 1), (8, 1, 4, 4), (8, 2, 4, 2), (8, 9, 4, 1)],
)
def test_the_cores_are_divided_between_trainer_and_engines(cores, num_engines, trainer, engine):
    plan = plan_threads(load_config([], {"cluster": {"num_engines": num_engines}}), cores)
    assert (plan.trainer, plan.engine) == (trainer, engine)


def test_threads_that_are_set_count():
    plan = plan_threads(load_config([], {"engine": {"threads": 3}, "training": {"threads": 5}}), 2)
    assert (plan.trainer, plan.engine) == (5, 3)


@pytest.mark.parametrize(
    ("values", "follow"),
    [
        ({}, True),
        ({"order": "problem"}, False),
        ({"engine": {"threads": 1}}, False),
        ({"order": "problem", "cluster": {"cores": "follow"}}, True),
        ({"cluster": {"cores": "split"}}, False),
    ],
)
def test_cores_follow_demand_unless_bits_or_settings_forbid(values, follow):
    assert cores_follow_demand(load_config([], values)) is follow
