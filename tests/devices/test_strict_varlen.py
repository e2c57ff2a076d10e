"""The CUDA form of packed attention through torch's own `varlen_attn`, on a stand-in that refuses what CUDA refuses."""

import pytest
import torch

from polyrhythm.training.packing.device_attention import varlen_attention
from polyrhythm.training.packing.plan import AttentionPlan, Block
from polyrhythm.training.packing.reference_attention import disagreement
from tests.devices.strict_flash import strict_flash

BLOCKS = [Block(0, 3, (3, 4), (1, 2)), Block(6, 2, (8,), (3,))]


def rows(dtype: torch.dtype, head_dim: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, 11, head_dim).to(dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("repeats", [1, 3])
def test_half_precision_agrees_with_the_loop_forward_and_backward(dtype, repeats):
    with strict_flash():
        assert disagreement(varlen_attention, dtype=dtype, head_dim=64, repeats=repeats) is None


def test_single_precision_is_refused():
    with strict_flash(), pytest.raises(RuntimeError, match="only support fp16 and bf16"):
        varlen_attention(*rows(torch.float32), AttentionPlan(BLOCKS), 0.3)
    with strict_flash():
        assert "only support fp16 and bf16" in (disagreement(varlen_attention, dtype=torch.float32) or "")


def test_heads_that_flash_attention_does_not_know_are_refused():
    with strict_flash(), pytest.raises(RuntimeError, match="multiple of 8"):
        varlen_attention(*rows(torch.bfloat16, head_dim=12), AttentionPlan(BLOCKS), 0.3)


def test_a_wrong_number_format_of_the_bounds_is_refused(monkeypatch):
    plan = AttentionPlan(BLOCKS)
    segments = plan.segments_on(torch.device("cpu"))
    monkeypatch.setitem(segments.__dict__, "query_bounds", segments.query_bounds.long())
    with strict_flash(), pytest.raises(RuntimeError, match="cu_seqlens must have dtype int32"):
        varlen_attention(*rows(torch.bfloat16), plan, 0.3)


def test_a_causal_mask_at_the_wrong_corner_is_found():
    with strict_flash(shifted=True):
        assert "the output is off by" in (disagreement(varlen_attention, dtype=torch.bfloat16, head_dim=64) or "")


def test_without_the_operator_the_reason_is_told():
    assert "it raised NotImplementedError" in (disagreement(varlen_attention, dtype=torch.bfloat16) or "")
