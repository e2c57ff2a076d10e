"""An accelerator in Python on the CPU's numbers: tensors say that they are on npu:0, and what would hurt there is seen.

Import this first in a process of its own: it names torch's slot for other backends, once and for the whole process. A
tensor on the other device is refused beside one of ours, as are float64 numbers; what makes the host wait and what is
copied up is counted, with the line of this package that asked for it. Numbers are computed by the CPU's kernels, so that
results can be compared. Streams, memory limits and the rounding of real kernels are not pretended.
"""

import collections
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "npu"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
# A subclass of tensors cannot be an inference tensor; this must happen before anything is decorated with it.
torch.inference_mode = torch.no_grad

_aten = torch.ops.aten
_SYNCS = {
    _aten._local_scalar_dense.default, _aten.nonzero.default, _aten._unique2.default, _aten.unique_dim.default,
    _aten.unique_consecutive.default, _aten.masked_select.default, _aten.equal.default,
}  # fmt: skip
_INDEXING = (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default)
_PACKAGE = str(Path(__file__).parents[2] / "polyrhythm")


class Log:
    """What the device was asked for since `clear`, by kind and by kind and place."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.places: collections.Counter[tuple[str, str]] = collections.Counter()

    def clear(self) -> None:
        self.counts.clear()
        self.places.clear()

    def note(self, kind: str) -> None:
        self.counts[kind] += 1
        self.places[kind, place()] += 1


log = Log()


def place() -> str:
    """File and line of the innermost frame of this package; autograd's own operations have none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            return f"{frame.f_code.co_filename.removeprefix(_PACKAGE)[1:]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class PretendTensor(torch.Tensor):
    """A tensor on the device; `inner` has its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> "PretendTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE, requires_grad=requires_grad,
        )  # fmt: skip

    def __init__(self, inner: torch.Tensor, requires_grad: bool = False):
        self.inner = inner

    def tolist(self) -> Any:
        log.note("sync")
        return self.inner.tolist()

    def __repr__(self) -> str:
        return f"PretendTensor({self.inner})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = PretendTensor(self.inner.clone(), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, PretendTensor) else value


def _wrapped(value: Any) -> Any:
    return PretendTensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, PretendTensor) else value


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is _aten._to_copy.default:
        return _to_copy(*args, **kwargs)
    if func is _aten.copy_.default:
        return _copy(args[0], args[1])
    if func.namespace == "c10d":
        return _collective(func, args, kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    _refuse_others(func, tensors)
    if func in _SYNCS or _is_masked_indexing(func, args):
        log.note("sync")
    log.note("operation")
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    _refuse_float64(func, results)
    return return_and_correct_aliasing(func, args, kwargs, tree_map(_wrapped, out)) if results else out


def _collective(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Among ranks on such devices, by gloo; a library for devices has no double precision either."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    _refuse_others(func, tensors)
    _refuse_float64(func, tensors)
    return func(*tree_map(_inner, args), **tree_map(_inner, kwargs))


def _refuse_others(func: Any, tensors: list[torch.Tensor]) -> None:
    strangers = [tensor for tensor in tensors if not isinstance(tensor, PretendTensor) and tensor.dim()]
    if not strangers:
        return
    if func in _INDEXING:  # torch itself moves an index to the device
        log.note("copy")
        return
    raise RuntimeError(f"{place()}: {func} was given tensors on {DEVICE} and on {strangers[0].device}")


def _refuse_float64(func: Any, tensors: list[torch.Tensor]) -> None:
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        raise RuntimeError(f"{place()}: {func} makes float64 numbers on {DEVICE}, which has none")


def _is_masked_indexing(func: Any, args: Any) -> bool:
    return func in _INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])


def _to_copy(source: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    asked = kwargs.pop("device", None)
    stays = torch.device(asked or source.device).type == NAME
    kwargs.pop("non_blocking", None)
    out = _aten._to_copy.default(_inner(source), **kwargs)
    if not stays:
        log.note("sync")
        return out
    _refuse_float64(_aten._to_copy.default, [out])
    return _wrapped(out)


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if isinstance(target, PretendTensor) and not isinstance(source, PretendTensor):
        log.note("copy")
    if isinstance(source, PretendTensor) and not isinstance(target, PretendTensor):
        log.note("sync")
    _inner(target).copy_(_inner(source))
    return target


def _empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> torch.Tensor:  # fmt: skip
    return _made(torch.empty(size, dtype=dtype, device="cpu"))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> torch.Tensor:  # fmt: skip
    return _made(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _made(inner: torch.Tensor) -> torch.Tensor:
    _refuse_float64("a factory", [inner])
    return PretendTensor(inner)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _copy(target, source)


# All factories of torch come down to these, and what they made is filled through the dispatch above.
_library = torch.library.Library("aten", "IMPL")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
