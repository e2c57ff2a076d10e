"""Export: the policy as named tensors in the form that engines load.

The one place that decides under which names and in which number format weights leave the trainer. Engines ask here too
for the names of their own tensors, so the two sides cannot drift apart. Adapters that are merged, or other names and
formats for another kind of engine, are a change of this file.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

EXPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What engines load; what is wider is rounded to fp32."""


class Rows(NamedTuple):
    """What this process holds of a named tensor: consecutive rows, from `first_row` on, of all that `shape` has.

    Rows are counted along the first dimension; whoever holds the whole tensor has all of them from row 0 on.
    """

    name: str
    shape: tuple[int, ...]
    first_row: int
    rows: Tensor
    dtype: torch.dtype | None = None
    """The number format in which they are published, if it is another than their own."""

    @property
    def published_dtype(self) -> torch.dtype:
        return self.dtype or self.rows.dtype

    @property
    def is_whole(self) -> bool:
        return self.first_row == 0 and tuple(self.rows.shape) == self.shape


def whole(name: str, tensor: Tensor) -> Rows:
    """All rows of a tensor."""
    return Rows(name, tuple(tensor.shape), 0, tensor)


RowsOf = Callable[[str, Tensor], Rows]
"""What this process holds of a named tensor."""


def exported(
    policy: torch.nn.Module,
    rows_of: RowsOf = whole,
    masters: Mapping[Tensor, Tensor] = MappingProxyType({}),
    dtype: torch.dtype | None = None,
) -> Iterator[Rows]:
    """The policy's weights for engines, as much as `rows_of` says that this process holds of them.

    Parameters are published in `dtype`, or in their own number format; buffers always in theirs. Views of the policy, not copies. Those that have `masters` on the host are taken from there, to be rounded as they are
    written: nothing leaves the device.
    """
    on_host = {t: master for t, master in masters.items() if master.device.type == "cpu" != t.device.type}
    sources = named_weights(policy, on_host)
    parameters = {name for name, _ in policy.named_parameters(remove_duplicate=False)}
    for name, tensor in named_weights(policy).items():
        wanted = dtype if dtype is not None and name in parameters else tensor.dtype
        is_known = wanted in EXPORTED_DTYPES or not tensor.is_floating_point()
        yield rows_of(name, sources[name])._replace(dtype=wanted if is_known else torch.float32)


def named_weights(model: torch.nn.Module, instead: Mapping[Tensor, Tensor] = MappingProxyType({})) -> dict[str, Tensor]:
    """The tensors of a model by the names under which they are published; tied parameters appear once.

    `instead` has other tensors for some of them.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = instead.get(tensor, tensor).detach()
    return tensors
