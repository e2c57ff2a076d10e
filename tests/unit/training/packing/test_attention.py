import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyrhythm.errors import RunError, UserError
from polyrhythm.training.packing import attention, device_attention
from polyrhythm.training.packing.attention import merged_flash_attention, packed_attention
from polyrhythm.training.packing.device_attention import kernel_of_device, tnd_attention, varlen_attention
from polyrhythm.training.packing.layout import pack
from polyrhythm.training.packing.plan import AttentionPlan, Block, Run
from polyrhythm.training.packing.reference_attention import disagreement, looped_attention
from tests.devices import pretend_torch_npu

CPU = torch.device("cpu")
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
    assert disagreement(merged_flash_attention) is None
    wrong_scale = disagreement(lambda query, key, value, plan, scale: looped_attention(query, key, value, plan, 0.31))
    assert wrong_scale and wrong_scale.startswith("the output is off by")

    def drops_gradients(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        return looped_attention(query, key.detach() + 0 * key, value, plan, scale)

    assert (disagreement(drops_gradients) or "").startswith("the gradient of keys is off by")


def test_without_the_private_operators_the_loop_is_chosen(monkeypatch):
    def missing(*_: object, **__: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(attention, "_flash_forward", missing)
    forget_choices()
    assert attention.kernel_for(CPU, torch.float32, 16, 2) is looped_attention
    forget_choices()
    monkeypatch.undo()
    assert attention.kernel_for(CPU, torch.float32, 16, 2) is attention.cpu_attention


def test_half_precision_on_a_cpu_has_the_merge_too():
    assert attention.kernel_for(CPU, torch.bfloat16, 16, 2) is attention.cpu_attention
    assert disagreement(merged_flash_attention, dtype=torch.bfloat16, head_dim=64, repeats=3) is None


def forget_choices() -> None:
    attention.kernel_for.cache_clear()
    attention._cpu_kernel_for.cache_clear()


def test_a_device_without_a_kernel_is_refused():
    with pytest.raises(UserError, match="no attention kernel for device 'mps'"):
        attention.kernel_for(torch.device("mps"), torch.float32, 16, 2)


def test_each_device_has_a_kernel_for_the_number_formats_that_it_takes(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert kernel_of_device(cuda, torch.bfloat16) is varlen_attention
    assert kernel_of_device(cuda, torch.float32) is None, "flash attention refuses it: the loop is left"
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert kernel_of_device(cuda, torch.bfloat16) is None, "that operator refuses num_splits"
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert kernel_of_device(cuda, torch.float16) is None, "older than flash attention"


@pytest.fixture
def elsewhere(monkeypatch):
    """A device whose own kernel is given, and whose tensors are those of the CPU."""

    def make(kernel) -> torch.device:
        monkeypatch.setattr(attention, "kernel_of_device", lambda device, dtype: kernel)
        tested = attention.disagreement
        monkeypatch.setattr(attention, "disagreement", lambda kernel, device, **more: tested(kernel, **more))
        forget_choices()
        return torch.device("cuda")

    yield make
    forget_choices()


def test_a_kernel_that_agrees_with_the_loop_is_chosen(elsewhere, caplog):
    device = elsewhere(merged_flash_attention)
    assert attention.kernel_for(device, torch.float32, 16, 2) is merged_flash_attention
    assert not caplog.text


def test_a_kernel_that_disagrees_gives_way_to_the_loop_with_the_check_that_failed(elsewhere, caplog):
    def drops_gradients(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        return looped_attention(query, key.detach() + 0 * key, value, plan, scale)

    device = elsewhere(drops_gradients)
    assert attention.kernel_for(device, torch.float32, 16, 2) is looped_attention
    assert "drops_gradients on cuda in torch.float32 fails its self-test: the gradient of keys is off by" in caplog.text


def test_a_device_on_which_the_loop_fails_too_is_refused(elsewhere, monkeypatch):
    def fails(*_: object) -> Tensor:
        raise NotImplementedError("no such operator here")

    device = elsewhere(None)
    monkeypatch.setattr(attention, "looped_attention", fails)
    with pytest.raises(
        UserError, match=r"on cuda fails its self-test: it raised NotImplementedError: no such operator"
    ):
        attention.kernel_for(device, torch.float32, 16, 2)


def test_the_npu_form_describes_the_same_attention(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", pretend_torch_npu)
    assert disagreement(tnd_attention, dtype=torch.float32, head_dim=16) is None


def test_the_npu_form_is_called_again_where_it_would_have_too_many_segments(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", pretend_torch_npu)
    monkeypatch.setattr(pretend_torch_npu, "MAX_SEGMENTS", 2)
    assert "AssertionError" in (disagreement(tnd_attention, dtype=torch.float32) or "")
    monkeypatch.setattr(device_attention, "_MAX_NPU_SEGMENTS", 2)
    assert disagreement(tnd_attention, dtype=torch.float32) is None


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
