"""A module `torch_npu` with the one operator that is called, doing what its documentation says; install it by `install()`."""

import math
import sys
import types
from typing import Any

import torch
from torch import Tensor

MAX_SEGMENTS = 1024
ALIGNED_AT_LOWER_RIGHT = True


def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *, atten_mask: Tensor, scale: float,
    actual_seq_qlen: list[int], actual_seq_kvlen: list[int], sparse_mode: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """TND: [tokens, heads, dim], segments by their ends; sparse mode 3 is causal from the lower right corner of each."""
    assert input_layout == "TND" and sparse_mode == 3
    assert atten_mask.shape == (2048, 2048) and atten_mask.dtype == torch.bool
    assert query.size(1) == head_num
    assert actual_seq_qlen[-1] == len(query) and actual_seq_kvlen[-1] == len(key)
    assert len(actual_seq_qlen) == len(actual_seq_kvlen) <= MAX_SEGMENTS
    outputs, repeats = [], head_num // key.size(1)
    bounds = zip([0, *actual_seq_qlen], actual_seq_qlen, [0, *actual_seq_kvlen], actual_seq_kvlen, strict=False)
    for first_query, last_query, first_key, last_key in bounds:
        queries = query[first_query:last_query].transpose(0, 1)
        keys, values = (row[first_key:last_key].repeat_interleave(repeats, 1).transpose(0, 1) for row in (key, value))
        scores = queries @ keys.transpose(1, 2) * scale
        num_queries, num_keys = scores.shape[1:]
        hidden = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        hidden = hidden.triu(1 + (num_keys - num_queries) * ALIGNED_AT_LOWER_RIGHT)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        outputs.append((weights @ values).transpose(0, 1))
    return torch.cat(outputs), *(torch.empty(0),) * 6


def install() -> None:
    module: Any = types.ModuleType("torch_npu")
    module.npu_fusion_attention = npu_fusion_attention
    sys.modules["torch_npu"] = module
