import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from polyrhythm.errors import RunError, UserError
from polyrhythm.training.packing import attention
from polyrhythm.training.packing.attention import (
    agrees_with_loop,
    looped_attention,
    merged_flash_attention,
    packed_attention,
)
from polyrhythm.training.packing.device_attention import tnd_attention, varlen_attention
from polyrhythm.training.packing.layout import pack
from polyrhythm.training.packing.plan import AttentionPlan, Block, Run

TWO_BLOCKS = [Block(0, 3, (3, 5, 7), (2, 2, 1)), Block(8, 2, (10,), (3,))]
PROMPT_ALONE = Block(13, 2, (), ())  # all its completions have one token


def rows(num_tokens: int, num_heads: int = 4, num_kv_heads: int = 2, seed: int = 0) -> list[Tensor]:
    """Query, key and value as transformers hands them over: [1, H, T, D] views of [1, T, H, D]."""
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, num_tokens, heads, 8, generator=draw, dtype=torch.float64).transpose(1, 2).requires_grad_()
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    ]


def visible_TT(plan: AttentionPlan, num_tokens: int) -> Tensor:
    """The mask nobody materialises, by definition: own completion so far, and the whole prompt."""
    visible = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for block in plan.blocks:
        prompt = range(block.prompt_start, block.prompt_start + block.prompt_length)
        for t in prompt:
            visible[t, prompt.start : t + 1] = True
        for start, length in zip(block.completion_starts, block.completion_lengths, strict=True):
            for t in range(start, start + length):
                visible[t, prompt.start : prompt.stop] = True
                visible[t, start : t + 1] = True
    return visible


def dense_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    repeats = query.size(1) // key.size(1)
    scores = query @ key.repeat_interleave(repeats, 1).transpose(2, 3) * scale
    weights = scores.masked_fill(~visible_TT(plan, query.size(2)), float("-inf")).softmax(-1)
    return weights @ value.repeat_interleave(repeats, 1)


@pytest.mark.parametrize("kernel", [merged_flash_attention, looped_attention])
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(1, 12), min_size=1, max_size=6)), min_size=1, max_size=3
    ),
    num_kv_heads=st.sampled_from([1, 2, 4]),
)
def test_a_kernel_equals_attention_with_a_dense_mask(kernel, lengths, num_kv_heads):
    groups = [([0] * prompt, [[0] * length for length in completions]) for prompt, completions in lengths]
    (layout,) = pack(groups, share_prompt=True, max_tokens=10_000)
    plan = AttentionPlan(layout.blocks)
    inputs = rows(layout.num_tokens, num_kv_heads=num_kv_heads)
    actual, expected = kernel(*inputs, plan, 0.3), dense_attention(*inputs, plan, 0.3)
    upstream = torch.randn(actual.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(actual, expected, atol=1e-12)
    for a, e in zip(
        torch.autograd.grad(actual, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        assert torch.allclose(a, e, atol=1e-12)


def test_an_upstream_gradient_of_any_strides_is_read_right():
    plan = AttentionPlan(TWO_BLOCKS)
    inputs = rows(13)
    expanded = torch.autograd.grad(merged_flash_attention(*inputs, plan, 0.3).sum(), inputs)
    expected = torch.autograd.grad(dense_attention(*inputs, plan, 0.3).sum(), inputs)
    assert all(torch.allclose(a, e, atol=1e-12) for a, e in zip(expanded, expected, strict=True))


def test_queries_of_any_strides_are_read_right():
    plan = AttentionPlan(TWO_BLOCKS)
    inputs = rows(13)
    strided = [row.detach().permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2) for row in inputs]
    assert strided[0].stride(-1) != 1
    assert torch.equal(merged_flash_attention(*strided, plan, 0.3), merged_flash_attention(*inputs, plan, 0.3))


def test_equal_neighbours_become_one_kernel_call():
    plan = AttentionPlan(TWO_BLOCKS)
    assert plan.runs == (Run(0, 1, 3), Run(3, 2, 2), Run(7, 1, 1), Run(8, 1, 5))
    assert len(plan.crosses) == 1


def test_unshared_rows_are_runs_alone():
    (layout,) = pack([([1, 2], [[3, 6], [4, 6], [5, 6]])], share_prompt=False, max_tokens=99)
    plan = AttentionPlan(layout.blocks)
    assert plan.runs == (Run(0, 3, 3),)
    assert plan.crosses == ()


def test_the_private_operators_pass_the_self_test_and_wrong_ones_do_not(monkeypatch):
    assert agrees_with_loop(merged_flash_attention)
    assert not agrees_with_loop(lambda query, key, value, plan, scale: looped_attention(query, key, value, plan, 0.31))

    def drops_gradients(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        return looped_attention(query, key.detach() + 0 * key, value, plan, scale)

    assert not agrees_with_loop(drops_gradients)


def test_without_the_private_operators_the_loop_is_chosen(monkeypatch):
    def missing(*_: object, **__: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(attention, "_flash_forward", missing)
    attention.kernel_for.cache_clear()
    assert attention.kernel_for("cpu", torch.float32) is looped_attention
    attention.kernel_for.cache_clear()
    monkeypatch.undo()
    assert attention.kernel_for("cpu", torch.float32) is attention.cpu_attention


def test_a_device_without_a_kernel_is_refused():
    with pytest.raises(UserError, match="no attention kernel for device 'mps'"):
        attention.kernel_for("mps", torch.float32)


def test_flash_attention_on_cuda_is_for_the_number_formats_that_it_takes(monkeypatch):
    """The policy is in fp32, which flash attention refuses: there the loop over public operators is the only choice."""
    attention.kernel_for.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert attention.kernel_for("cuda", torch.float32) is looped_attention
    assert attention.kernel_for("cuda", torch.bfloat16) is varlen_attention
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert attention.kernel_for("cuda", torch.float16) is looped_attention
    attention.kernel_for.cache_clear()


def lower_right_segments(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, query_stops, key_stops, scale
) -> Tensor:
    """What a variable-length flash call computes: causal attention per segment, aligned at the lower right."""
    pieces = []
    bounds = zip([0, *query_stops], query_stops, [0, *key_stops], key_stops, strict=False)
    for q_start, q_stop, k_start, k_stop in bounds:
        query, key, value = (
            row[start:stop].transpose(0, 1).unsqueeze(0)
            for row, start, stop in (
                (query_THD, q_start, q_stop),
                (key_THD, k_start, k_stop),
                (value_THD, k_start, k_stop),
            )
        )
        bias = causal_lower_right(query.size(2), key.size(2))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, scale=scale, enable_gqa=True
        )
        pieces.append(out[0].transpose(0, 1))
    return torch.cat(pieces)


def test_the_cuda_form_describes_the_same_attention(monkeypatch):
    """The segments it builds, run through an emulated operator: no GPU here."""

    def emulated(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa, num_splits):
        assert window_size == (-1, 0)
        assert (max_q, max_k) == (5, 5)
        return lower_right_segments(query, key, value, cu_seq_q.tolist()[1:], cu_seq_k.tolist()[1:], scale)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", emulated)
    plan, inputs = AttentionPlan([*TWO_BLOCKS, PROMPT_ALONE]), rows(15)
    assert torch.allclose(varlen_attention(*inputs, plan, 0.3), dense_attention(*inputs, plan, 0.3), atol=1e-12)


def test_the_npu_form_describes_the_same_attention(monkeypatch):
    def emulated(query, key, value, num_heads, *, input_layout, atten_mask, scale, **segments):
        assert (num_heads, input_layout, segments["sparse_mode"]) == (4, "TND", 3)
        assert bool(atten_mask[0, 1]) and not bool(atten_mask[1, 0])
        stops = segments["actual_seq_qlen"], segments["actual_seq_kvlen"]
        return (lower_right_segments(query, key, value, *stops, scale),)

    monkeypatch.setitem(sys.modules, "torch_npu", types.SimpleNamespace(npu_fusion_attention=emulated))
    plan, inputs = AttentionPlan([*TWO_BLOCKS, PROMPT_ALONE]), rows(15)
    assert torch.allclose(tnd_attention(*inputs, plan, 0.3), dense_attention(*inputs, plan, 0.3), atol=1e-12)


def test_attention_without_a_layout_is_an_error():
    query, key, value = rows(13)
    with pytest.raises(RunError, match="without a layout"):
        packed_attention(torch.nn.Identity(), query, key, value, None)


def test_a_shared_prompt_never_meets_dropout():
    query, key, value = rows(13)
    with pytest.raises(RunError, match="share_prompt"):
        packed_attention(
            torch.nn.Identity(), query, key, value, None, attention_plan=AttentionPlan(TWO_BLOCKS), dropout=0.1
        )


def test_a_window_longer_than_every_sequence_changes_nothing():
    inputs = rows(13)
    wide, none = (
        packed_attention(
            torch.nn.Identity(), *inputs, None, attention_plan=AttentionPlan(TWO_BLOCKS), sliding_window=window
        )[0]
        for window in (5, None)
    )
    assert torch.equal(wide, none)
