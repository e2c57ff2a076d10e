import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.training.logprobs import token_logprobs


def full_logits(hidden, weight, target, *, row=None, bias=None, temperature=1.0):
    """The oracle: all logits at once, log-probabilities and entropy by their definitions."""
    rows = hidden if row is None else hidden[row]
    distribution = (torch.nn.functional.linear(rows, weight, bias) / temperature).log_softmax(dim=-1)
    entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return distribution.gather(1, target[:, None]).squeeze(1), entropy


def example(num_rows=7, width=6, vocab_size=23, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, width, generator=draw, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab_size, width, generator=draw, dtype=dtype).requires_grad_()
    bias = torch.randn(vocab_size, generator=draw, dtype=dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, vocab_size, (num_rows,), generator=draw)


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    chunk_bytes=st.sampled_from([1, 100, 400, 10**6]),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_entropy_and_gradients_equal_those_of_full_logits(num_rows, chunk_bytes, temperature, with_bias, seed):
    hidden, weight, bias, target = example(num_rows, seed=seed)
    chosen = {"bias_V": bias} if with_bias else {}
    actual, entropy = token_logprobs(hidden, weight, target, temperature=temperature, chunk_bytes=chunk_bytes, **chosen)
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


@pytest.mark.parametrize("chunk_bytes", [200, 10**6])
def test_a_row_that_predicts_several_tokens_collects_all_their_gradients(chunk_bytes):
    hidden, weight, _, _ = example(num_rows=3)
    row, target = torch.tensor([2, 0, 2, 1, 2]), torch.tensor([5, 1, 5, 0, 22])
    actual, entropy = token_logprobs(hidden, weight, target, row_N=row, chunk_bytes=chunk_bytes)
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
@pytest.mark.parametrize("chunk_bytes", [200, 10**6])
def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_still_do(chunk_bytes, in_place):
    hidden, weight, _, target = example()
    expected = torch.autograd.grad(full_logits(hidden, weight, target)[0].sum(), hidden)[0]
    weight.requires_grad_(False)
    logprobs, _ = token_logprobs(hidden, weight, target, in_place=in_place, chunk_bytes=chunk_bytes)
    logprobs.sum().backward()
    assert weight.grad is None
    assert torch.allclose(hidden.grad, expected)


@pytest.mark.parametrize("chunk_bytes", [200, 10**6])
def test_in_place_the_weights_gradient_is_added_to_what_is_there(chunk_bytes):
    hidden, weight, bias, target = example()
    expected = torch.autograd.grad(full_logits(hidden, weight, target, bias=bias)[0].sum(), [hidden, weight, bias])
    weight.grad = torch.ones_like(weight)
    for _ in range(2):
        token_logprobs(hidden, weight, target, bias_V=bias, in_place=True, chunk_bytes=chunk_bytes)[0].sum().backward()
    assert torch.allclose(weight.grad, 1 + 2 * expected[1])
    assert torch.allclose(hidden.grad, 2 * expected[0])
    assert torch.allclose(bias.grad, 2 * expected[2])


def test_a_few_rows_round_like_many():
    hidden, weight, _, target = example(num_rows=40, width=64, vocab_size=999, dtype=torch.float32)
    many_N, _ = token_logprobs(hidden, weight, target)
    for num_rows in (1, 2, 3, 7, 17):
        few_N, _ = token_logprobs(hidden[:num_rows], weight, target[:num_rows])
        assert torch.equal(few_N, many_N[:num_rows])


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


def test_large_logits_neither_overflow_nor_lose_the_answer():
    hidden, weight, _, target = example(dtype=torch.float32)
    actual, entropy = token_logprobs(hidden * 1e4, weight, target)
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
