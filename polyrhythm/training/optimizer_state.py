"""The state of any torch optimizer as named tensors and JSON, and back: what a checkpoint keeps, without pickle.

A tensor of a parameter's state is called `name.key`, such as `lm_head.weight.exp_avg`; numbers and strings, and what the
optimizer has changed in its parameter groups by itself, are one JSON text, kept as bytes in a tensor too.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyrhythm.errors import RunError
from polyrhythm.weights.store import can_be_stored

JSON_NAME = "json"
SCALARS = (bool, int, float, str, type(None))
OWNED = ("params", "lr")
"""What of a group is not the optimizer's: the parameters, and the learning rate that every update is given."""

GroupSettings = list[dict[str, Any]]


class CannotBeKept(RunError):
    """The optimizer holds something that is neither a tensor nor a number or string."""


def group_settings(optimizer: torch.optim.Optimizer) -> GroupSettings:
    """What each parameter group says, without its parameters and learning rate."""
    return [{key: value for key, value in group.items() if key not in OWNED} for group in optimizer.param_groups]


def state_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], at_the_start: GroupSettings
) -> dict[str, Tensor]:
    """The whole state by name. `at_the_start` is what the groups said when the optimizer was made."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        if parameter not in names:
            raise CannotBeKept(f"{type(optimizer).__name__} keeps a state for {type(parameter).__name__}, no parameter")
        for key, value in state.items():
            full = f"{names[parameter]}.{key}"
            if isinstance(value, Tensor) and can_be_stored(value) and "." not in str(key):
                tensors[full] = value
            elif isinstance(value, SCALARS) and "." not in str(key):
                scalars[full] = value
            else:
                raise _cannot_be_kept(optimizer, f"state {key!r}", value)
    said = {"kind": _kind(optimizer), "scalars": scalars, "groups": _changed_settings(optimizer, at_the_start)}
    tensors[JSON_NAME] = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    return tensors


def restore_state(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], tensors: Mapping[str, Tensor]) -> None:
    """Put a state that `state_tensors` has given into an optimizer over parameters of the same names."""
    said = json.loads(tensors[JSON_NAME].numpy().tobytes())
    if said["kind"] != _kind(optimizer):
        raise RunError(
            f"the optimizer's state is that of a {said['kind']}, and training.optimizer is a {_kind(optimizer)}"
        )
    parameters = {name: parameter for parameter, name in names.items()}
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.state.clear()
    values = {**{name: value for name, value in tensors.items() if name != JSON_NAME}, **said["scalars"]}
    for full, value in values.items():
        name, _, key = full.rpartition(".")
        if name not in parameters:
            raise RunError(f"the optimizer's state is of another model: it has {name}")
        parameter = parameters[name]
        if isinstance(value, Tensor) and _is_on_the_device(value, groups[parameter]):
            value = value.to(parameter.device)
        optimizer.state[parameter][key] = value
    if len(said["groups"]) != len(optimizer.param_groups):
        raise RunError("the optimizer's state has other parameter groups: keep training.weight_decay_exclude as it was")
    for group, changed in zip(optimizer.param_groups, said["groups"], strict=True):
        group.update(changed)


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _is_on_the_device(value: Tensor, group: Mapping[str, Any]) -> bool:
    """torch keeps a counter of updates on the host, unless one kernel makes the whole update."""
    return value.dim() > 0 or bool(group.get("fused")) or bool(group.get("capturable"))


def _changed_settings(optimizer: torch.optim.Optimizer, at_the_start: GroupSettings) -> GroupSettings:
    """What the optimizer itself has changed: the rest is the configuration's, which may be another one next time."""
    changed = []
    for now, before in zip(group_settings(optimizer), at_the_start, strict=True):
        different = {key: value for key, value in now.items() if key not in before or value is not before[key]}
        for key, value in different.items():
            if not isinstance(value, SCALARS):
                raise _cannot_be_kept(optimizer, f"setting {key!r}", value)
        changed.append(different)
    return changed


def _cannot_be_kept(optimizer: torch.optim.Optimizer, what: str, value: object) -> CannotBeKept:
    kind = f"tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    return CannotBeKept(
        f"{type(optimizer).__name__} has a {what} that a checkpoint cannot keep (a {kind}): only tensors, numbers and strings"
    )
