import pytest
import torch
import torch.nn.functional as F

from polyrhythm.engine.projection import Projection


@pytest.fixture(params=["packed", "plain"])
def projection(request, monkeypatch) -> Projection:
    if request.param == "plain":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    torch.manual_seed(0)
    return Projection(torch.randn(48, 64), torch.randn(48))


def test_products_and_what_follows_them_equal_the_plain_operations(projection: Projection):
    inputs, other = torch.randn(16, 64), torch.randn(16, 48)
    product = F.linear(inputs, projection.weight, projection.bias)
    for got, expected in [
        (projection(inputs), product),
        (projection.silu(inputs), F.silu(product)),
        (projection.times(inputs, other), product * other),
        (projection.plus(inputs, other), product + other),
    ]:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_changed_weights_are_used_after_a_refresh(projection: Projection):
    inputs = torch.randn(16, 64)
    projection.weight.mul_(2)
    projection.refresh()
    expected = F.linear(inputs, projection.weight, projection.bias)
    torch.testing.assert_close(projection(inputs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 48), (576, 960), (1536, 576), (160, 64)])
def test_a_row_has_the_same_bits_whatever_the_number_of_rows_and_threads(num_inputs, num_outputs):
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
