"""A policy that computes in fewer digits, and its fp32 *masters*, which are what is trained.

Products and activations are in the number format of the policy. Gradients are summed in fp32, the optimizer moves the
masters, and the policy gets them back rounded. The masters and the optimizer's state may live on the host while the policy
is on an accelerator. Checkpoints hold the masters.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from polyrhythm.training.policy.accumulate import sum_in_fp32

Masters = Mapping[Tensor, Tensor]
"""By the parameter whose master it is; empty for a policy that is its own."""


def split_masters(policy: PreTrainedModel, dtype: torch.dtype, on_host: bool) -> Masters:
    """Round the policy to `dtype` and keep what it was. Buffers, such as rotary frequencies, stay as they are."""
    masters: dict[Tensor, Tensor] = {}
    rounded: dict[Tensor, Parameter] = {}
    for parameter in policy.parameters():
        leaves = on_host and parameter.device.type != "cpu"
        if parameter.dtype == dtype and not leaves:
            continue
        full = parameter.detach().cpu() if leaves else parameter.detach()
        rounded[parameter] = Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
        masters[rounded[parameter]] = Parameter(full, requires_grad=parameter.requires_grad)
        if parameter.requires_grad and dtype != full.dtype:
            sum_in_fp32(rounded[parameter])
    _replace(policy, rounded)
    return masters


@torch.no_grad()
def round_masters(masters: Masters) -> None:
    """Give every parameter the number that is nearest to its master."""
    for parameter, master in masters.items():
        parameter.copy_(master)


def put_masters_back(policy: PreTrainedModel, masters: Masters) -> None:
    """The policy is its masters again, with all digits."""
    _replace(
        policy, {parameter: Parameter(master.detach().to(parameter.device)) for parameter, master in masters.items()}
    )


def _replace(policy: PreTrainedModel, parameters: Mapping[Tensor, Parameter]) -> None:
    """Put other parameters in the place of these; what is tied stays tied."""
    for module in policy.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in parameters:
                setattr(module, name, parameters[parameter])
