"""Packed attention by one variable-length call of an accelerator's own operator, keys and values gathered per completion.

No accelerator has run it: `attention` uses a kernel only after it has agreed with plain operators on the user's device.
"""

import functools
from itertools import pairwise

import torch
from torch import Tensor

from polyrhythm.errors import UserError
from polyrhythm.training.packing.plan import AttentionPlan
from polyrhythm.training.packing.reference_attention import Kernel

_MAX_NPU_SEGMENTS = 1024  # of one call, by the operator's documentation
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_CAPABILITY = (8, 0)


def kernel_of_device(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """The accelerator's own kernel for a number format; None if it has none."""
    if device.type == "npu":
        return tnd_attention
    if device.type != "cuda":
        raise UserError(f"no attention kernel for device {device.type!r}: use cpu, cuda or npu")
    is_nvidia = torch.version.hip is None  # the other's operator refuses `num_splits`
    is_flash = dtype in _FLASH_DTYPES and torch.cuda.get_device_capability(device) >= _FLASH_CAPABILITY
    return varlen_attention if is_nvidia and is_flash else None


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """CUDA, in half precision."""
    from torch.nn.attention.varlen import varlen_attn

    segments = plan.segments_on(query.device)
    out = varlen_attn(
        query[0].transpose(0, 1),
        _gathered(key, segments.key_index_K),
        _gathered(value, segments.key_index_K),
        segments.query_bounds,
        segments.key_bounds,
        segments.longest_query,
        segments.longest_key,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=True,
        num_splits=1,
    )
    assert isinstance(out, Tensor)
    return out.transpose(0, 1).unsqueeze(0)


def tnd_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Ascend NPU: the TND form of its fused operator, in which segments are given by their ends, on the host."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    segments = plan.segments_on(query.device)
    queries, keys, values = query[0].transpose(0, 1), *(_gathered(row, segments.key_index_K) for row in (key, value))
    query_bounds, key_bounds = (0, *segments.query_stops), (0, *segments.key_stops)
    cuts = [*range(0, len(segments.query_stops), _MAX_NPU_SEGMENTS), len(segments.query_stops)]
    pieces: list[Tensor] = []
    for first, last in pairwise(cuts):
        rows, columns = slice(query_bounds[first], query_bounds[last]), slice(key_bounds[first], key_bounds[last])
        pieces.append(
            torch_npu.npu_fusion_attention(
                queries[rows],
                keys[columns],
                values[columns],
                query.size(1),
                input_layout="TND",
                atten_mask=_compressed_causal_mask(query.device),
                scale=scale,
                actual_seq_qlen=[stop - rows.start for stop in query_bounds[first + 1 : last + 1]],
                actual_seq_kvlen=[stop - columns.start for stop in key_bounds[first + 1 : last + 1]],
                sparse_mode=3,  # causal, aligned at the lower right corner
            )[0]
        )
    return torch.cat(pieces).transpose(0, 1).unsqueeze(0)


@functools.cache
def _compressed_causal_mask(device: torch.device) -> Tensor:
    """What sparse mode 3 wants whatever the lengths, True where masked: 4 MB, made once."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


def _gathered(row: Tensor, index_K: Tensor) -> Tensor:
    """[1, H, T, D] as [K, H, D]. The gradient of `index_select` is a sum by index; that of brackets sorts first."""
    return row[0].transpose(0, 1).index_select(0, index_K)
