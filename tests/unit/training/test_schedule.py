"""The learning rate as a function of the number of updates, beside that of transformers."""

import pytest
import torch
from transformers import get_scheduler

from polyrhythm.config import TrainingConfig
from polyrhythm.training.schedule import learning_rates

NUM_STEPS = 20
OPTIONS = {
    "constant_with_warmup": {},
    "cosine": {},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_with_restarts": {"num_cycles": 2},
    "inverse_sqrt": {"timescale": 7},
    "linear": {},
    "polynomial": {"power": 2.0, "lr_end": 1e-5},
    "warmup_stable_decay": {"num_decay_steps": 6, "min_lr_ratio": 0.05},
}


def theirs(name: str, num_warm: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    scheduler = get_scheduler(name, optimizer, num_warm, NUM_STEPS, OPTIONS[name])
    rates = []
    for _ in range(NUM_STEPS):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def ours(**settings) -> list[float]:
    config = TrainingConfig(learning_rate=1e-3, **settings)
    rates = learning_rates(config, NUM_STEPS)
    return [rates(number) for number in range(NUM_STEPS * config.updates_per_step)]


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_after_the_warm_up_the_rates_are_those_of_transformers_and_before_it_none_is_zero(name):
    assert ours(schedule=name, schedule_options=OPTIONS[name]) == pytest.approx(theirs(name, 0))
    rates = ours(schedule=name, schedule_options=OPTIONS[name], warmup_steps=4)
    assert rates[4:] == pytest.approx(theirs(name, 4)[4:])
    if name == "warmup_stable_decay":  # it rises from its minimum
        assert rates[:4] == pytest.approx([1e-3 * (0.05 + 0.95 * number / 4) for number in (1, 2, 3, 4)])
    else:
        assert rates[:4] == pytest.approx([1e-3 * number / 4 for number in (1, 2, 3, 4)])


def test_a_constant_rate_may_be_warmed_up_too():
    assert ours(warmup_steps=2)[:4] == [0.5e-3, 1e-3, 1e-3, 1e-3]
    assert set(ours()) == {1e-3}


def test_options_that_count_steps_count_those_of_the_run_however_many_updates_they_make():
    options = {"schedule": "warmup_stable_decay", "schedule_options": {"num_decay_steps": 5, "decay_type": "linear"}}
    rates = ours(**options, updates_per_step=2)
    assert rates[:30] == [1e-3] * 30 and rates[31] < 1e-3
    assert rates[-1] == pytest.approx(1e-4)
