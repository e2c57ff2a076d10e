import pytest
import torch
from torch import Tensor

from polyrhythm.training.policy.fused import _mlp_forward, _norm_forward, _RmsNorm, _SwiGlu, fuse_elementwise
from tests.conftest import build_tiny_model


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_gradients(function, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def check(fused, plain, inputs: list[Tensor], upstream: Tensor) -> None:
    """Output and gradients against the same formula in double precision."""
    actual = with_gradients(fused, inputs, upstream)
    expected = with_gradients(plain, [tensor.double() for tensor in inputs], upstream.double())
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).abs().max() < 2e-6 * max(1.0, e.abs().max().item())


@pytest.mark.parametrize("num_rows", [1, 31, 32, 100])
def test_the_fused_norm_is_an_rms_norm(num_rows):
    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    inputs = [draw(1, num_rows, 48) * 3, draw(48, seed=1)]
    check(lambda x, weight: _RmsNorm.apply(x, weight, 1e-5), plain, inputs, draw(1, num_rows, 48, seed=2))


def test_the_fused_gate_is_silu_times_up_for_small_and_huge_numbers():
    gate = draw(1, 7, 32) * torch.logspace(-3, 2.5, 32)
    inputs, upstream = [gate, draw(1, 7, 32, seed=1)], draw(1, 7, 32, seed=2)
    check(_SwiGlu.apply, lambda gate, up: torch.nn.functional.silu(gate) * up, inputs, upstream)


def test_an_expanded_gradient_is_read_right():
    inputs = [draw(1, 5, 32), draw(32, seed=1)]
    norm = lambda x, weight: _RmsNorm.apply(x, weight, 1e-5)  # noqa: E731
    expanded = with_gradients(norm, inputs, torch.ones(1).expand(1, 5, 32))
    dense = with_gradients(norm, inputs, torch.ones(1, 5, 32))
    assert all(torch.equal(a, b) for a, b in zip(expanded, dense, strict=True))


def test_bits_depend_on_neither_neighbours_nor_threads():
    x, weight, upstream = draw(1, 100, 64), draw(64, seed=1), draw(1, 100, 64, seed=2)
    whole = with_gradients(lambda x: _RmsNorm.apply(x, weight, 1e-5), [x], upstream)
    part = with_gradients(lambda x: _RmsNorm.apply(x, weight, 1e-5), [x[:, 37:50]], upstream[:, 37:50])
    assert all(torch.equal(a[:, 37:50], b) for a, b in zip(whole, part, strict=True))
    torch.set_num_threads(2)
    try:
        again = with_gradients(lambda x: _RmsNorm.apply(x, weight, 1e-5), [x], upstream)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_norms_and_gates_of_known_models_are_fused(kind):
    model = build_tiny_model(kind)
    fuse_elementwise(model)
    layer = model.model.layers[0]
    assert layer.input_layernorm.forward.__func__ is _norm_forward
    assert layer.mlp.forward.__func__ is _mlp_forward


def test_models_in_other_number_formats_are_left_alone():
    model = build_tiny_model("llama").double()
    fuse_elementwise(model)
    assert "forward" not in model.model.norm.__dict__
