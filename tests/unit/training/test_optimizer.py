import copy

import pytest
import torch

from polyrhythm.config import TrainingConfig
from polyrhythm.errors import RunError
from polyrhythm.training.optimizer import Optimizer

CONFIG = TrainingConfig(learning_rate=0.1, weight_decay=0.01)


def trained(model: torch.nn.Linear) -> Optimizer:
    optimizer = Optimizer(model, CONFIG)
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step(divisor=2.0)
    return optimizer


def test_an_update_without_gradients_is_the_same_in_a_process_that_has_just_resumed():
    model = torch.nn.Linear(3, 3)
    gone_on = trained(model)
    resumed_model = copy.deepcopy(model)
    resumed = Optimizer(resumed_model, CONFIG)
    for name, moment in resumed.moments().items():
        moment.copy_(gone_on.moments()[name])
    resumed.num_updates = gone_on.num_updates
    resumed_model.zero_grad(set_to_none=True)
    before = model.weight.clone()
    for optimizer in (gone_on, resumed):
        optimizer.step(divisor=1.0)
    assert not torch.equal(model.weight, before), "momentum moves it"
    assert torch.equal(model.weight, resumed_model.weight)


def test_warm_up_is_counted_in_steps_however_many_updates_they_make():
    optimizer = Optimizer(torch.nn.Linear(1, 1), TrainingConfig(learning_rate=1.0, warmup_steps=5, updates_per_step=4))
    optimizer.num_updates = 9
    assert optimizer.learning_rate() == pytest.approx(0.5)


def test_a_gradient_that_is_not_finite_ends_the_run_before_anything_is_updated():
    model = torch.nn.Linear(3, 3)
    optimizer = trained(model)
    before = model.weight.clone()
    model(torch.full((1, 3), float("inf"))).sum().backward()
    with pytest.raises(RunError, match="not finite"):
        optimizer.step(divisor=1.0)
    assert torch.equal(model.weight, before)
