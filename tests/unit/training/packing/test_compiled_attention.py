import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyrhythm.kernels.compiling import forget_kernels
from polyrhythm.kernels.packed_attention import packed_attention_for
from polyrhythm.training.packing import attention
from polyrhythm.training.packing.attention import cpu_attention
from polyrhythm.training.packing.compiled_attention import compiled_attention, tables_of
from polyrhythm.training.packing.layout import Layout, pack
from polyrhythm.training.packing.plan import AttentionPlan
from polyrhythm.training.packing.reference_attention import disagreement, looped_attention

SCALE = 0.3
lengths_of_groups = st.lists(
    st.tuples(st.integers(1, 150), st.lists(st.integers(1, 80), min_size=1, max_size=6)), min_size=1, max_size=3
)


def layout_of(lengths, share_prompt: bool = True) -> Layout:
    groups = [([0] * prompt, [[0] * length for length in completions]) for prompt, completions in lengths]
    (layout,) = pack(groups, share_prompt=share_prompt, max_tokens=100_000)
    return layout


def rows(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, seed: int = 0) -> list[Tensor]:
    """Query, key, value and an upstream gradient as transformers hands them over: views of [1, T, H, D]."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(1, num_tokens, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)]
    return [torch.randn(shape, generator=draw).transpose(1, 2) for shape in shapes]


def scale_of(query: Tensor) -> float:
    """That of real models: larger scores round more."""
    return query.size(-1) ** -0.5


def attend(inputs: list[Tensor], layout: Layout) -> list[Tensor]:
    """Output and gradients of the compiled kernel."""
    *leaves, upstream = inputs
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    kernel = packed_attention_for(leaves[0], leaves[1], leaves[2])
    assert kernel is not None, "these tests need a C compiler"
    out = compiled_attention(leaves[0], leaves[1], leaves[2], layout.blocks, scale_of(leaves[0]), kernel)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@settings(max_examples=40)
@given(
    lengths=lengths_of_groups,
    shape=st.sampled_from([(4, 4, 16), (9, 3, 64), (2, 1, 128), (32, 1, 16)]),
    share_prompt=st.booleans(),
)
def test_the_kernel_equals_public_operators_in_double_precision(lengths, shape, share_prompt):
    layout = layout_of(lengths, share_prompt)
    inputs = rows(layout.num_tokens, *shape)
    *leaves, upstream = (tensor.double() for tensor in inputs)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = looped_attention(leaves[0], leaves[1], leaves[2], AttentionPlan(layout.blocks), scale_of(leaves[0]))
    expected = [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
    for actual, exact in zip(attend(inputs, layout), expected, strict=True):
        assert actual.shape == exact.shape
        assert (actual - exact).abs().max() < 2e-6 * exact.abs().max() + 1e-6


@settings(max_examples=20)
@given(lengths=lengths_of_groups)
def test_a_completion_is_the_same_bits_with_a_shared_prompt_and_with_its_own(lengths):
    shared, unshared = layout_of(lengths), layout_of(lengths, share_prompt=False)
    inputs = rows(shared.num_tokens, 6, 2, 32)
    source: list[int] = []  # where each token of the unshared row lies in the shared one
    for block, (_, completions) in zip(shared.blocks, lengths, strict=True):
        spans = zip(block.completion_starts, block.completion_lengths, strict=True)
        for length in completions:
            source += range(block.prompt_start, block.prompt_start + block.prompt_length)
            if length > 1:  # one token has nothing in the row
                start, own = next(spans)
                source += range(start, start + own)
    out_of_shared = attend(inputs, shared)[0]
    out_of_unshared = attend([tensor[:, :, source] for tensor in inputs], unshared)[0]
    assert torch.equal(out_of_unshared, out_of_shared[:, :, source])


def test_outputs_and_gradients_are_the_same_bits_with_one_and_two_threads():
    layout = layout_of([(100, [20, 30, 1, 70])])
    inputs = rows(layout.num_tokens, 9, 3, 64)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            results.append(attend(inputs, layout))
        finally:
            torch.set_num_threads(1)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_tensors_of_any_strides_are_read_right():
    layout = layout_of([(9, [4, 2])])
    inputs = rows(layout.num_tokens, 4, 2, 16)
    strided = [tensor.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2) for tensor in inputs]
    strided[3] = torch.ones(1).expand_as(inputs[3])
    assert strided[0].stride(-1) != 1
    expected = attend([*inputs[:3], torch.ones_like(inputs[3])], layout)
    assert all(torch.equal(a, e) for a, e in zip(attend(strided, layout), expected, strict=True))


def test_the_parts_of_a_long_block_cost_about_the_same():
    layout = layout_of([(512, [64] * 8)])
    tables = tables_of(layout.blocks, 3, 32)
    assert tables.num_parts == 4
    work = [
        sum(
            tables.segments[segment][3] + first // 3 + 1
            for segment, first in tables.blocks[first_block:last_block].tolist()
        )
        for first_block, last_block, *_ in tables.tasks.tolist()
    ]
    assert max(work) < 1.1 * min(work)
    assert tables.tasks[0][0] == 0 and tables.tasks[-1][1] == len(tables.blocks)


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch, caplog):
    layout = layout_of([(9, [4, 2])])
    query, key, value, _ = rows(layout.num_tokens, 4, 2, 16)
    plan = AttentionPlan(layout.blocks)
    expected = attention.merged_flash_attention(query, key, value, plan, SCALE)

    def wrong(query: Tensor, key: Tensor, value: Tensor, blocks: object, scale: float, kernel: object) -> Tensor:
        return attention.merged_flash_attention(query, key, value, plan, scale * 1.01)

    monkeypatch.setattr(attention, "compiled_attention", wrong)
    attention._is_sound.cache_clear()
    assert torch.equal(cpu_attention(query, key, value, plan, SCALE), expected)
    attention._is_sound.cache_clear()
    assert "fails its self-test" in caplog.text


def test_narrow_vectors_compute_the_same(monkeypatch):
    """Those of machines without AVX; without the flag a machine that is not an x86 has them anyway."""
    monkeypatch.setenv("CC", "cc -mno-avx" if platform.machine() == "x86_64" else "cc")
    forget_kernels()
    query, key, value, _ = rows(1, 6, 2, 64)
    kernel = packed_attention_for(query, key, value)
    forget_kernels()
    assert kernel is not None and kernel.queries_per_block == 16

    def attend(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        return compiled_attention(query, key, value, plan.blocks, scale, kernel)

    assert disagreement(attend, head_dim=64, repeats=3, dtype=torch.float32) is None


def test_a_kernel_that_is_switched_off_is_not_used(monkeypatch):
    query, key, value, _ = rows(1, 4, 2, 16)
    monkeypatch.setenv("POLYRHYTHM_KERNELS", "off:packed")
    assert packed_attention_for(query, key, value) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_number_formats_use_torch_operators(dtype):
    query = torch.zeros(1, 4, 3, 16, dtype=dtype)
    assert packed_attention_for(query, query, query) is None
    assert packed_attention_for(query.float(), query.float(), query) is None
    assert disagreement(cpu_attention, dtype=dtype) is None


def test_what_is_not_a_number_stays_visible():
    layout = layout_of([(70, [40, 5])])
    query, key, value, upstream = rows(layout.num_tokens, 4, 2, 16)
    query[0, 0, 80], key[0, 1, 3] = float("nan"), float("inf")
    out, grad_query, *_ = attend([query, key, value, upstream], layout)
    assert out[0, 0, 80].isnan().all() and grad_query[0, 0, 80].isnan().all()
    assert out[0, 2:, 3:].isnan().any(-1).all()
    assert out[0, 1].isfinite().all() and out[0, 2:, :3].isfinite().all()


def test_second_derivatives_are_refused():
    layout = layout_of([(9, [4])])
    query, key, value, upstream = (tensor.requires_grad_() for tensor in rows(layout.num_tokens, 4, 2, 16))
    out = cpu_attention(query, key, value, AttentionPlan(layout.blocks), SCALE)
    (gradient,) = torch.autograd.grad(out, query, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
