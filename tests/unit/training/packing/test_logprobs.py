import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.kernels.elementwise import can_be_fused
from polyrhythm.training.packing.logprobs import token_logprobs

SIZES = [{"tile_size": (2, 16), "kept_bytes": 600}, {"tile_size": (100, 100), "kept_bytes": 0}, {}]
"""Several tiles, some of which are kept; one that is not kept; the defaults, which keep it."""


def full_logits(hidden, weight, target, *, row=None, bias=None, temperature=1.0):
    """The oracle: all logits at once, log-probabilities and entropy by their definitions."""
    rows = hidden if row is None else hidden[row]
    distribution = (torch.nn.functional.linear(rows, weight, bias) / temperature).log_softmax(dim=-1)
    entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return distribution.gather(1, target[:, None]).squeeze(1), entropy


def example(num_rows=7, width=6, vocab_size=71, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, width, generator=draw, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab_size, width, generator=draw, dtype=dtype).requires_grad_()
    bias = torch.randn(vocab_size, generator=draw, dtype=dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, vocab_size, (num_rows,), generator=draw)


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    tile_size=st.sampled_from([(1, 16), (3, 100), (7, 32), (16, 16), (100, 48)]),
    kept_bytes=st.sampled_from([0, 300, 5000, 10**6]),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_entropy_and_gradients_equal_those_of_full_logits(
    num_rows, tile_size, kept_bytes, temperature, with_bias, seed
):
    hidden, weight, bias, target = example(num_rows, seed=seed)
    chosen = {"bias_V": bias} if with_bias else {}
    actual, entropy = token_logprobs(
        hidden, weight, target, temperature=temperature, tile_size=tile_size, kept_bytes=kept_bytes, **chosen
    )
    expected, expected_entropy = full_logits(
        hidden, weight, target, bias=bias if with_bias else None, temperature=temperature
    )
    upstream = torch.randn(num_rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    pairs = zip(
        [actual, entropy, *torch.autograd.grad(actual, inputs, upstream)],
        [expected, expected_entropy, *torch.autograd.grad(expected, inputs, upstream)],
        strict=True,
    )
    assert all(torch.allclose(a, e, rtol=1e-10, atol=1e-12) for a, e in pairs)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_row_that_predicts_several_tokens_collects_all_their_gradients(sizes):
    hidden, weight, _, _ = example(num_rows=3)
    row, target = torch.tensor([2, 0, 2, 1, 2]), torch.tensor([5, 1, 5, 0, 22])
    actual, entropy = token_logprobs(hidden, weight, target, row_N=row, **sizes)
    expected, expected_entropy = full_logits(hidden, weight, target, row=row)
    upstream = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=torch.float64)
    assert torch.allclose(entropy, expected_entropy)
    for a, e in zip(
        torch.autograd.grad(actual, [hidden, weight], upstream),
        torch.autograd.grad(expected, [hidden, weight], upstream),
        strict=True,
    ):
        assert torch.allclose(a, e, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_still_do(sizes, in_place):
    hidden, weight, _, target = example()
    expected = torch.autograd.grad(full_logits(hidden, weight, target)[0].sum(), hidden)[0]
    weight.requires_grad_(False)
    logprobs, _ = token_logprobs(hidden, weight, target, in_place=in_place, **sizes)
    logprobs.sum().backward()
    assert weight.grad is None
    assert torch.allclose(hidden.grad, expected)


@pytest.mark.parametrize("sizes", SIZES)
def test_in_place_the_weights_gradient_is_added_to_what_is_there(sizes):
    hidden, weight, bias, target = example()
    expected = torch.autograd.grad(full_logits(hidden, weight, target, bias=bias)[0].sum(), [hidden, weight, bias])
    weight.grad = torch.ones_like(weight)
    for _ in range(2):
        token_logprobs(hidden, weight, target, bias_V=bias, in_place=True, **sizes)[0].sum().backward()
    assert torch.allclose(weight.grad, 1 + 2 * expected[1])
    assert torch.allclose(hidden.grad, 2 * expected[0])
    assert torch.allclose(bias.grad, 2 * expected[2])


@pytest.mark.parametrize("num_rows", [1, 5, 50])
@pytest.mark.parametrize("sizes", [{"tile_size": (20, 64), "kept_bytes": 9000}, {}])
@pytest.mark.parametrize("vocab_size", [2048, 2041])
def test_in_fp32_it_is_as_exact_by_a_kernel_as_by_operators(sizes, vocab_size, num_rows):
    hidden, weight, bias, target = example(num_rows, width=32, vocab_size=vocab_size, dtype=torch.float32)
    assert can_be_fused(weight, 64)
    actual = token_logprobs(hidden, weight, target, bias_V=bias, temperature=0.7, **sizes)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    expected = full_logits(wide[0], wide[1], target, bias=wide[2], temperature=0.7)
    upstream = torch.linspace(-1, 2, num_rows)
    gradients = torch.autograd.grad(actual[0], [hidden, weight, bias], upstream)
    expected_gradients = torch.autograd.grad(expected[0], wide, upstream.double())
    assert (actual[0] - expected[0]).abs().max() < 2e-5
    assert (actual[1] - expected[1]).abs().max() < 2e-5
    for a, e in zip(gradients, expected_gradients, strict=True):
        assert (a - e).norm() < 1e-5 * e.norm()


@pytest.mark.parametrize("vocab_size", [64, 71])
@pytest.mark.parametrize("columns", [16, 100])
def test_what_is_not_a_number_is_not_hidden(vocab_size, columns):
    hidden, weight, _, target = example(num_rows=20, vocab_size=vocab_size, dtype=torch.float32)
    hidden.data[3, 2] = float("nan")
    logprobs, entropy = token_logprobs(hidden, weight, target, tile_size=(100, columns))
    assert logprobs.isnan().nonzero().tolist() == entropy.isnan().nonzero().tolist() == [[3]]
    weight.data[50, 1] = float("nan")
    logprobs, entropy = token_logprobs(hidden, weight, target, tile_size=(100, columns))
    assert logprobs.isnan().all() and entropy.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [float("-inf"), -3e38])
def test_a_bias_can_mask_a_part_of_the_vocabulary(dtype, masked):
    hidden, weight, bias, target = example(num_rows=20, vocab_size=64, dtype=dtype)
    bias.data[16:40] = masked
    target = target % 16
    logprobs, entropy = token_logprobs(hidden, weight, target, bias_V=bias, tile_size=(100, 16))
    allowed = [*range(16), *range(40, 64)]
    expected, expected_entropy = full_logits(hidden, weight[allowed], target, bias=bias[allowed])
    assert torch.allclose(logprobs, expected, atol=1e-5)
    assert torch.allclose(entropy, expected_entropy, atol=1e-5)


def test_a_target_outside_the_vocabulary_has_no_probability():
    hidden, weight, _, target = example()
    target[2], target[4] = 71, -1
    with torch.no_grad():
        logprobs, _ = token_logprobs(hidden, weight, target)
    assert logprobs.isnan().nonzero().flatten().tolist() == [2, 4]


def test_as_many_logits_are_kept_as_memory_allows_and_none_without_gradients(monkeypatch):
    hidden, weight, _, target = example(num_rows=20)
    logprobs, _ = token_logprobs(hidden, weight, target, tile_size=(20, 16), kept_bytes=2 * 20 * 16 * 8)
    kept = logprobs.grad_fn.kept
    assert [tile.shape for tile in kept] == [(20, 16)] * 2
    logprobs.sum().backward()
    assert kept == []
    fits = []
    monkeypatch.setattr(
        "polyrhythm.training.packing.logprobs._num_that_fit", lambda _, numbers: fits.append(numbers) or 0
    )
    with torch.no_grad():
        token_logprobs(hidden, weight, target)
    assert fits == [0]


@pytest.mark.parametrize("vocab_size", [999, 1024])
def test_a_few_rows_round_like_many(vocab_size):
    hidden, weight, _, target = example(num_rows=40, width=64, vocab_size=vocab_size, dtype=torch.float32)
    many = token_logprobs(hidden, weight, target, tile_size=(100, 160))
    in_two = token_logprobs(hidden, weight, target, tile_size=(20, 160))
    assert all(torch.equal(*pair) for pair in zip(in_two, many, strict=True))
    for num_rows in (1, 2, 3, 7, 17, 38):
        few = token_logprobs(hidden[:num_rows], weight, target[:num_rows], tile_size=(100, 160))
        assert all(torch.equal(f, m[:num_rows]) for f, m in zip(few, many, strict=True))


def test_a_rows_bits_do_not_depend_on_what_is_kept():
    hidden, weight, _, target = example(num_rows=40, width=64, vocab_size=1024, dtype=torch.float32)
    results = []
    for kept_bytes in (0, 30_000, 10**6):
        logprobs, _ = token_logprobs(hidden, weight, target, tile_size=(100, 128), kept_bytes=kept_bytes)
        results.append([logprobs, *torch.autograd.grad(logprobs.sum(), [hidden, weight])])
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))


def test_tied_embeddings_add_both_gradients_into_one_parameter():
    _, weight, _, target = example()
    source = torch.arange(7)
    token_logprobs(weight[source], weight, target)[0].sum().backward()
    expected = torch.autograd.grad(full_logits(weight[source], weight, target)[0].sum(), weight)[0]
    assert torch.allclose(weight.grad, expected)


def test_the_entropy_carries_no_gradient():
    hidden, weight, _, target = example()
    logprobs, entropy = token_logprobs(hidden, weight, target)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


@pytest.mark.parametrize("vocab_size", [64, 71])
def test_large_logits_neither_overflow_nor_lose_the_answer(vocab_size):
    hidden, weight, _, target = example(vocab_size=vocab_size, dtype=torch.float32)
    actual, entropy = token_logprobs(hidden * 1e4, weight, target, tile_size=(100, 16))
    expected, _ = full_logits((hidden * 1e4).double(), weight.double(), target)
    assert torch.isfinite(entropy).all()
    assert torch.allclose(actual.double(), expected, rtol=1e-5)


def test_a_backward_pass_can_be_repeated():
    hidden, weight, _, target = example()
    logprobs, _ = token_logprobs(hidden, weight, target)
    first = torch.autograd.grad(logprobs.sum(), [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(logprobs.sum(), [hidden, weight])
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_second_derivatives_are_refused():
    hidden, weight, _, target = example()
    (gradient,) = torch.autograd.grad(
        token_logprobs(hidden, weight, target)[0].square().sum(), hidden, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_bf16_weights_are_scored_in_fp32():
    hidden, weight, _, target = (t.detach() for t in example(dtype=torch.bfloat16))
    logprobs, _ = token_logprobs(hidden.requires_grad_(), weight.requires_grad_(), target)
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
