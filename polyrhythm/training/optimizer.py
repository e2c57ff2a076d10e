"""The end of an update: divide the summed gradients once, clip, and let the optimizer move the parameters."""

import inspect
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyrhythm.config import TrainingConfig
from polyrhythm.errors import RunError, UserError
from polyrhythm.training.optimizer_state import CannotBeKept, group_settings, restore_state, state_tensors
from polyrhythm.training.policy.accumulate import gradient_of
from polyrhythm.training.policy.masters import Masters, round_masters
from polyrhythm.training.schedule import learning_rates
from polyrhythm.user_code import find_kind
from polyrhythm.weights.pieces.layout import DTYPES
from polyrhythm.weights.snapshot import TensorEntry
from polyrhythm.weights.store import space_for

OPTIMIZERS = {"adamw": "torch.optim:AdamW"}

log = logging.getLogger(__name__)


class Optimizer:
    """A torch optimizer over fp32 gradient sums; `step(divisor)` makes the one division of the update."""

    def __init__(self, model: torch.nn.Module, config: TrainingConfig, num_steps: int, masters: Masters | None = None):
        self.config = config
        self._masters = masters or {}
        trained: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(trained)
        self.names = {self._masters.get(parameter, parameter): name for parameter, name in trained.items()}
        self._parameters_by_name = {name: parameter for parameter, name in self.names.items()}
        self.num_updates = 0
        self.inner = _make(config, self.names)
        self._settings_at_the_start = group_settings(self.inner)
        self._learning_rates = learning_rates(config, num_steps)

    def learning_rate(self) -> float:
        """Of the next update."""
        return self._learning_rates(self.num_updates)

    def gradients(self) -> list[Tensor]:
        """Zeros where no rollout gave one: the moments must move alike in a new process and in one that has trained before."""
        return [gradient_of(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self, divisor: float) -> dict[str, float]:
        learning_rate = self.learning_rate()
        gradients = self.gradients()
        gradient_norm = float(_whole(torch.nn.utils.get_total_norm(gradients))) / divisor
        if not math.isfinite(gradient_norm):
            raise RunError(
                f"the gradient of update {self.num_updates} is not finite ({gradient_norm}): nothing was updated; go on from "
                "the last checkpoint with a lower training.learning_rate"
            )
        clip = min(1.0, self.config.max_grad_norm / (gradient_norm + 1e-6))
        torch._foreach_mul_(gradients, clip / divisor)  # pyright: ignore  # the division and the clipping in one pass over memory
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if parameter in self._masters:
                master = self._masters[parameter]
                master.grad = gradient.to(master.device)
        self.inner.step()
        round_masters(self._masters)
        torch._foreach_zero_(gradients)  # pyright: ignore  # kept, not freed: fresh pages cost more than zeroing
        self.num_updates += 1
        return {"train/grad_norm": gradient_norm, "train/learning_rate": learning_rate}

    def state(self) -> dict[str, Tensor]:
        """All that the optimizer remembers, by name, for a checkpoint."""
        return state_tensors(self.inner, self.names, self._settings_at_the_start)

    def space_for(self, name: str, entry: TensorEntry) -> Tensor:
        """For a tensor of a state that was kept; as many rows of it as this process holds of its parameter."""
        parameter = self._parameters_by_name.get(name.rpartition(".")[0])
        if not isinstance(parameter, DTensor) or entry.shape != list(parameter.shape):
            return space_for(entry)
        return torch.empty_like(parameter, dtype=DTYPES[entry.dtype], requires_grad=False)

    def round_masters(self) -> None:
        """After the masters were read from a checkpoint."""
        round_masters(self._masters)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state that was kept."""
        restore_state(self.inner, self.names, state)


def _whole(norm: Tensor) -> Tensor:
    """Of gradients that are sharded, the norm of all their rows: a collective operation."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def try_optimizer(config: TrainingConfig, num_steps: int) -> None:
    """Two updates of a few numbers: a UserError for what would fail in the middle of a run, or in its first checkpoint."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.LayerNorm(4, bias=False))
    optimizer = Optimizer(model, config, num_steps)
    try:
        for _ in range(2):
            for gradient in optimizer.gradients():
                gradient.fill_(0.1)
            optimizer.step(divisor=1.0)
        optimizer.state()
    except CannotBeKept as error:
        raise UserError(f"training.optimizer={config.optimizer!r} could not be resumed: {error}") from None
    # The class is somebody else's: it may fail in any way.
    except Exception as error:
        raise _refused(config, error) from error


def _make(config: TrainingConfig, names: Mapping[Tensor, str]) -> torch.optim.Optimizer:
    kind = find_kind("training.optimizer", config.optimizer, OPTIMIZERS, "kind of optimizer")
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise UserError(f"training.optimizer={config.optimizer!r} is not a torch.optim.Optimizer: name a class that is")
    options: dict[str, Any] = {"lr": config.learning_rate}
    if config.optimizer == "adamw":
        options |= {"betas": (config.adam_beta1, config.adam_beta2), "fused": True}
    if "weight_decay" in inspect.signature(kind).parameters or config.weight_decay:
        options["weight_decay"] = config.weight_decay
    try:
        return kind(_groups(config, names), **options | config.optimizer_options)
    # As above; torch raises TypeError and ValueError for options and for parameters of a shape it does not take.
    except Exception as error:
        raise _refused(config, error) from error


def _groups(config: TrainingConfig, names: Mapping[Tensor, str]) -> list[dict[str, Any]]:
    """One group, or a second one without weight decay."""
    excluded = [p for p, name in names.items() if any(part in name for part in config.weight_decay_exclude)]
    if not excluded:
        return [{"params": list(names)}]
    log.info("%d of %d parameters have no weight decay", len(excluded), len(names))
    rest = set(names) - set(excluded)
    groups = [{"params": [p for p in names if p in rest]}, {"params": excluded, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _refused(config: TrainingConfig, error: Exception) -> UserError:
    said = str(error).splitlines() or [type(error).__name__]
    return UserError(
        f"training.optimizer={config.optimizer!r} with training.optimizer_options={config.optimizer_options} cannot train "
        f"a model here: {said[0]}"
    )
