"""FSDP2 around a model, set so that what its ranks add up is the gradient that one process has: a sum, never a mean.

A tensor is cut along its first dimension, so that the part of a rank is some consecutive rows of it. Rows of what is trained
are fp32, and so are sums of gradients, over passes and over ranks. Layers compute with weights that were rounded to the
policy's number format before they were brought together.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from polyrhythm.errors import UserError
from polyrhythm.training.policy.accumulate import sum_in_fp32
from polyrhythm.training.policy.tri_model import SCORE_ROW
from polyrhythm.weights.export import Rows, whole


def shard_model(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    reshard: bool,
    dtype: torch.dtype = torch.float32,
    offload: bool = False,
) -> None:
    """Leave the rows of this rank. All ranks of the mesh call this.

    `reshard`: weights are whole only while their layer computes; `dtype`: that of whole weights; `offload`: rows are on the host.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f'{type(model).__name__} has no layers that could be sharded one by one: use training.parallel="replicate"'
        )
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    formats = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=formats, offload_policy=policy)
    for module in sharded_modules(model):  # the two hold for a module alone, not for those inside
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other way to divide by nothing
        if dtype != torch.float32:
            _sum_in_fp32(module)
    register_fsdp_forward_method(model, SCORE_ROW)


def _sum_in_fp32(module: FSDPModule) -> None:
    """Whole weights are made in the first pass; their gradients shall have all digits from then on."""
    module.unshard()
    for weight in module.parameters():  # pyright: ignore  # FSDPModule is mixed into a module
        if weight.requires_grad and not isinstance(weight, DTensor):  # of modules inside, the rows
            sum_in_fp32(weight)
    module.reshard()


def sharded_modules(model: torch.nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def let_go(model: torch.nn.Module) -> None:
    """Of whole weights: the next pass brings them together again from the rows that there are then."""
    for module in sharded_modules(model):
        module.reshard()


def held_rows(name: str, tensor: Tensor) -> Rows:
    """A tensor that is cut, or one that every rank has."""
    if not isinstance(tensor, DTensor) or not isinstance(tensor.placements[0], Shard):
        return whole(name, tensor)
    return Rows(name, tuple(tensor.shape), _first_row(tensor), tensor.to_local())


def _first_row(tensor: DTensor) -> int:
    rows_per_rank = -(-tensor.shape[0] // tensor.device_mesh.size())
    return min(tensor.device_mesh.get_local_rank() * rows_per_rank, tensor.shape[0])
