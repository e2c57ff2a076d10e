import copy

import pytest
import torch

from polyrhythm.cluster.preflight import check_training
from polyrhythm.config import TrainingConfig, load_config
from polyrhythm.errors import RunError, UserError
from polyrhythm.training.optimizer import Optimizer, try_optimizer

CONFIG = TrainingConfig(learning_rate=0.1, weight_decay=0.01)
KINDS = {
    "adamw": {},
    "adamw ": {"amsgrad": True},
    "torch.optim:Adafactor": {},
    "torch.optim:Adagrad": {},
    "torch.optim:NAdam": {},
    "torch.optim:RMSprop": {"momentum": 0.5},
    "torch.optim:SGD": {"momentum": 0.9, "nesterov": True},
    "transformers.optimization:Adafactor": {"scale_parameter": False, "relative_step": False},
    f"{__name__}:Impatient": {},
}
"""Each with options."""


class Impatient(torch.optim.SGD):
    """It changes a setting of its groups by itself, and counts in a plain number."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["patience"] = group.get("patience", 1.0) * 0.5
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
                parameter.sub_(parameter.grad, alpha=group["lr"] * group["patience"] * self.state[parameter]["count"])


class Listing(torch.optim.SGD):
    """What it remembers is a list."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("history", []).append(1.0)


def trained(model: torch.nn.Module, config: TrainingConfig = CONFIG, num_updates: int = 1) -> Optimizer:
    optimizer = Optimizer(model, config, num_steps=10)
    go_on(optimizer, model, num_updates)
    return optimizer


def go_on(optimizer: Optimizer, model: torch.nn.Module, num_updates: int) -> None:
    for number in range(num_updates):
        model(torch.ones(2, 3) * (number + 1)).square().sum().backward()
        optimizer.step(divisor=2.0)


def restored(optimizer: Optimizer, model: torch.nn.Module) -> tuple[Optimizer, torch.nn.Module]:
    """The same in a new process: a copy of the weights, and of the state as a checkpoint keeps it."""
    twin = copy.deepcopy(model)
    twin.zero_grad(set_to_none=True)
    again = Optimizer(twin, optimizer.config, num_steps=10)
    again.restore({name: tensor.clone() for name, tensor in optimizer.state().items()})
    again.num_updates = optimizer.num_updates
    return again, twin


def test_an_update_without_gradients_is_the_same_in_a_process_that_has_just_resumed():
    model = torch.nn.Linear(3, 3)
    gone_on = trained(model)
    resumed, resumed_model = restored(gone_on, model)
    before = model.weight.clone()
    for optimizer in (gone_on, resumed):
        optimizer.step(divisor=1.0)
    assert not torch.equal(model.weight, before), "momentum moves it"
    assert torch.equal(model.weight, resumed_model.weight)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_any_optimizer_goes_on_from_its_state_with_the_same_bits(kind):
    config = TrainingConfig(learning_rate=0.1, optimizer=kind.strip(), optimizer_options=KINDS[kind], schedule="linear")
    try_optimizer(config, num_steps=10)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    whole = trained(model, config, num_updates=3)
    resumed, twin = restored(whole, model)
    go_on(whole, model, 2)
    go_on(resumed, twin, 2)
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert resumed.state().keys() == whole.state().keys()


def test_a_state_before_the_first_update_is_a_state_too():
    model = torch.nn.Linear(3, 3)
    whole = trained(model, num_updates=0)
    resumed, twin = restored(whole, model)
    go_on(whole, model, 2)
    go_on(resumed, twin, 2)
    assert torch.equal(model.weight, twin.weight)


def test_what_the_optimizer_did_not_change_itself_follows_the_new_configuration():
    model = torch.nn.Linear(3, 3)
    state = trained(model).state()
    other = Optimizer(model, TrainingConfig(weight_decay=0.5), num_steps=10)
    other.restore(state)
    assert other.inner.param_groups[0]["weight_decay"] == 0.5


def test_the_state_of_another_optimizer_is_refused():
    model = torch.nn.Linear(3, 3)
    sgd = Optimizer(model, TrainingConfig(optimizer="torch.optim:SGD"), num_steps=10)
    with pytest.raises(
        RunError, match=r"that of a torch.optim.adamw.AdamW, and training.optimizer is a torch.optim.sgd.SGD"
    ):
        sgd.restore(trained(model).state())


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"optimizer": "lion"}, "training.optimizer='lion' is not a kind of optimizer: use adamw or module:name"),
        ({"optimizer": "torch.nn:Linear"}, "'torch.nn:Linear' is not a torch.optim.Optimizer"),
        ({"optimizer": "torch.optim:Lion"}, "'torch.optim:Lion' cannot be imported"),
        ({"optimizer": "torch.optim:LBFGS"}, "cannot train a model here: .*closure"),
        ({"optimizer": "torch.optim:Muon"}, "cannot train a model here: Muon only supports 2D parameters"),
        ({"optimizer": "torch.optim:SGD", "optimizer_options": {"speed": 1}}, "unexpected keyword argument 'speed'"),
        ({"optimizer": "torch.optim:SparseAdam"}, "cannot train a model here: SparseAdam does not support dense"),
        ({"optimizer": f"{__name__}:Listing"}, "could not be resumed: Listing has a state 'history' .*a list"),
        ({"schedule": "cosine_with_min_lr"}, "One of min_lr or min_lr_rate should be set"),
        ({"schedule": "cosine", "schedule_options": {"min_lr": 1e-6}}, "unexpected keyword argument 'min_lr'"),
        ({"schedule": "warmup_stable_decay"}, "missing 1 required positional argument: 'num_decay_steps'"),
        ({"schedule": "constant", "schedule_options": {"min_lr": 0}}, "has no options: remove training.schedule_options"),
        ({"schedule": "polynomial", "learning_rate": 1e-8}, "lr_end .* must be smaller than initial lr"),
        ({"schedule": "warmup_stable_decay", "schedule_options": {"num_decay_steps": "few"}}, "is not possible"),
    ],
)  # fmt: skip
def test_an_optimizer_or_schedule_that_would_fail_later_is_refused_before_the_start(training, said):
    with pytest.raises(UserError, match=said):
        check_training(load_config([], {"training": training}))


def test_usual_settings_are_known_to_work_without_trying(monkeypatch):
    monkeypatch.setattr("polyrhythm.training.optimizer.try_optimizer", None)
    check_training(load_config([], {"training": {"schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.1}}))


def test_parameters_whose_names_are_excluded_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    model[1].weight.data.fill_(2.0)
    before = copy.deepcopy(model.state_dict())
    config = TrainingConfig(learning_rate=0.1, weight_decay=0.5, weight_decay_exclude=["bias", "1.w"])
    Optimizer(model, config, num_steps=1).step(divisor=1.0)
    after = model.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"] * (1 - 0.1 * 0.5)), "without gradients only decay moves it"
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(after[name], before[name])


def test_warm_up_is_counted_in_steps_however_many_updates_they_make():
    optimizer = Optimizer(
        torch.nn.Linear(1, 1), TrainingConfig(learning_rate=1.0, warmup_steps=5, updates_per_step=4), 10
    )
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
