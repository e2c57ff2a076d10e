"""Attention by plain arithmetic for what kernels do not know: sliding windows, soft-capped scores, sinks, dropout."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from polyrhythm.training.packing.plan import AttentionPlan, causal_segments, span_of


@dataclass(frozen=True)
class Extras:
    """What some models ask of attention beyond the causal one."""

    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    sinks: Tensor | None = None
    """One logit per head that takes its share of the weight and gives nothing."""

    @property
    def are_none(self) -> bool:
        return self.window is None and self.softcap is None and self.dropout == 0.0 and self.sinks is None

    @property
    def are_masks(self) -> bool:
        return self.softcap is None and self.dropout == 0.0 and self.sinks is None


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float, extras: Extras
) -> Tensor:
    """Sliding windows, soft-capped scores, sinks or dropout: a loop like `looped_attention`, in plain arithmetic."""
    pieces: list[Tensor] = []
    for block in plan.blocks:
        first, *others = causal_segments(block)
        prompt = span_of(*first)
        pieces.append(_explicit(query[:, :, prompt], key[:, :, prompt], value[:, :, prompt], scale, extras))
        for start, length in others:
            own = span_of(start, length)
            keys, values = (torch.cat([row[:, :, prompt], row[:, :, own]], dim=2) for row in (key, value))
            pieces.append(_explicit(query[:, :, own], keys, values, scale, extras))
    return torch.cat(pieces, dim=2)


def _explicit(query: Tensor, key: Tensor, value: Tensor, scale: float, extras: Extras) -> Tensor:
    """Queries are the last positions of the keys."""
    num_queries, num_keys = query.size(2), key.size(2)
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
    if extras.window is not None:
        visible = visible.triu(num_keys - num_queries + 1 - extras.window)
    if extras.are_masks:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=True)
    repeats = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(2, 3) * scale
    if extras.softcap is not None:
        scores = extras.softcap * torch.tanh(scores / extras.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if extras.sinks is not None:
        sinks = extras.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, -1, num_queries, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1, dtype=_wide(scores)).to(query.dtype)[..., :num_keys]
    return F.dropout(weights, extras.dropout) @ value


def _wide(scores: Tensor) -> torch.dtype:
    return torch.promote_types(scores.dtype, torch.float32)
