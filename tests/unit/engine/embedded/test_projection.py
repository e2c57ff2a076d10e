import pytest
import torch
import torch.nn.functional as F

from polyrhythm.engine.embedded.projection import CompiledProduct, OneDnnProduct, PlainProduct, Projection

FORMS = {"compiled": CompiledProduct, "onednn": OneDnnProduct, "plain": PlainProduct}


@pytest.fixture(params=FORMS)
def form(request, monkeypatch) -> str:
    """The forms of machines with a compiler, without one, and without oneDNN as well."""
    if request.param != "compiled":
        monkeypatch.setenv("POLYRHYTHM_KERNELS", "off:product")
    if request.param == "plain":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    return request.param


@pytest.fixture
def projection(form) -> Projection:
    torch.manual_seed(0)
    projection = Projection(torch.randn(53, 64), torch.randn(53))
    assert isinstance(projection._product, FORMS[form])
    return projection


def test_products_and_what_follows_them_equal_the_plain_operations(projection: Projection):
    inputs, other = torch.randn(17, 64), torch.randn(17, 53)
    product = F.linear(inputs, projection.weight, projection.bias)
    for got, expected in [
        (projection(inputs), product),
        (projection.silu(inputs), F.silu(product)),
        (projection.times(inputs, other), product * other),
        (projection.plus(inputs, other), product + other),
    ]:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_any_number_of_rows_inputs_and_outputs_is_multiplied_right():
    torch.manual_seed(2)
    for num_rows, num_inputs, num_outputs in [(1, 1, 1), (4, 193, 31), (13, 16, 33), (28, 200, 16), (250, 40, 70)]:
        inputs, weight = torch.randn(num_rows, num_inputs), torch.randn(num_outputs, num_inputs)
        expected = inputs.double() @ weight.double().T
        assert (Projection(weight)(inputs) - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max().item())


def test_changed_weights_are_used_after_a_refresh(projection: Projection):
    inputs = torch.randn(16, 64)
    projection.weight.mul_(2)
    projection.refresh()
    expected = F.linear(inputs, projection.weight, projection.bias)
    torch.testing.assert_close(projection(inputs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["compiled", "onednn"], indirect=True)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 48), (576, 960), (1536, 576), (160, 64)])
def test_a_row_has_the_same_bits_whatever_the_number_of_rows_and_threads(form, num_inputs, num_outputs):
    torch.manual_seed(1)
    projection = Projection(torch.randn(num_outputs, num_inputs))
    inputs, other = torch.randn(96, num_inputs), torch.randn(96, num_outputs)
    threads_before = torch.get_num_threads()
    seen = set()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for first, last in [(0, 16), (0, 24), (0, 96), (8, 40), (15, 31)]:
            rows, others = inputs[first:last], other[first:last]
            results = (projection.silu(rows), projection.times(rows, others), projection.plus(rows, others))
            seen.add(b"".join(result[15 - first].numpy().tobytes() for result in results))
    torch.set_num_threads(threads_before)
    assert len(seen) == 1
