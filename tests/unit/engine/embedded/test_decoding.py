import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.engine.embedded.batch import padded_rows
from polyrhythm.engine.embedded.decoding import CompiledDecoding, Heads, Rotation, TorchDecoding, decoding_for
from polyrhythm.engine.embedded.kv_cache import KvCache, KvRange, slots_needed
from polyrhythm.kernels.decoding_attention import SPAN

CPU = torch.device("cpu")
FORMS = ["compiled", "torch"]


def form_of(name: str, heads: Heads) -> CompiledDecoding | TorchDecoding:
    if name == "torch":
        return TorchDecoding(heads)
    decoding = decoding_for(heads, CPU)
    assert isinstance(decoding, CompiledDecoding), "these tests need a C compiler"
    return decoding


class Batch:
    """Requests of (prompt length, rows, own length) as a decoding batch has them, with a cache full of noise."""

    def __init__(self, heads: Heads, requests: list[tuple[int, int, int]], seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.heads = heads
        self.num_rows = sum(rows for _, rows, _ in requests)
        self.num_padded_rows = padded_rows(self.num_rows)
        self.where, self.spans = [], np.empty(len(requests), SPAN)
        start = first = 0
        for index, (prompt, rows, own) in enumerate(requests):
            where = KvRange(start, prompt, rows, own + index % 3)
            self.where.append(where)
            last = first + rows
            self.spans[index] = (first, last, start, prompt, where.strip_start(0), where.strip_length, own)
            start, first = start + slots_needed(prompt, rows, where.strip_length), last
        self.cache = KvCache(2, start, heads.num_kv_heads, heads.dim, CPU)
        for stored in (self.cache.keys, self.cache.values):
            stored.copy_(torch.randn(stored.shape, generator=generator))
        rows, both = self.num_padded_rows, heads.num_heads + heads.num_kv_heads
        joined = torch.randn(rows, both + heads.num_kv_heads, heads.dim, generator=generator)
        self.queries_and_keys, self.values = joined.split((both, heads.num_kv_heads), 1)
        angles = torch.rand(rows, 1, heads.dim // 2, generator=generator) * 6
        self.rotation = Rotation(angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1))

    def slots(self) -> torch.Tensor:
        slots = torch.full((self.num_padded_rows,), self.cache.padding_slot)
        for where, (first, last, *_, own) in zip(self.where, self.spans.tolist(), strict=True):
            slots[first:last] = torch.tensor([where.strip_start(strip) + own - 1 for strip in range(last - first)])
        return slots

    def attend(self, form: str, layer: int = 1) -> torch.Tensor:
        attention = form_of(form, self.heads)(self.cache, self, self.rotation)  # pyright: ignore
        return attention(layer, self.queries_and_keys, self.values)[: self.num_rows].clone()

    def expected(self, layer: int = 1) -> torch.Tensor:
        """In fp64, from the cache as `attend` has left it."""
        heads = self.heads
        queries = self.rotation(self.queries_and_keys)[:, : heads.num_heads].double()
        rows = []
        for where, (first, last, *_, own) in zip(self.where, self.spans.tolist(), strict=True):
            prompt = torch.arange(where.start, where.start + where.prompt_length)
            for row in range(first, last):
                strip = where.strip_start(row - first)
                slots = torch.cat((prompt, torch.arange(strip, strip + own)))
                keys, values = (
                    stored[layer][:, slots].transpose(0, 1).double().repeat_interleave(heads.repeats, 1)
                    for stored in (self.cache.keys, self.cache.values)
                )
                weights = (torch.einsum("hd,khd->hk", queries[row], keys) * heads.scale).softmax(-1)
                rows.append(torch.einsum("hk,khd->hd", weights, values).flatten())
        return torch.stack(rows)


@pytest.mark.parametrize("form", FORMS)
@given(
    requests=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 9), st.integers(1, 140)), min_size=1, max_size=4),
    shape=st.sampled_from([(4, 4, 16), (6, 2, 32), (9, 3, 64), (7, 1, 32), (32, 2, 16)]),
    seed=st.integers(0, 1000),
)
def test_decoding_equals_attention_over_prompt_and_own_tokens(form, requests, shape, seed):
    num_heads, num_kv_heads, dim = shape
    batch = Batch(Heads(num_heads, num_kv_heads, dim, dim**-0.5), requests, seed)
    other_layer = batch.cache.keys[0].clone()
    output = batch.attend(form)
    assert (output.double() - batch.expected()).abs().max() < 5e-6
    assert torch.equal(batch.cache.keys[0], other_layer)


@pytest.mark.parametrize("form", FORMS)
def test_new_keys_and_values_are_in_the_cache_where_they_belong(form):
    heads = Heads(9, 3, 64, 0.125)
    batch = Batch(heads, [(20, 8, 5), (3, 2, 70)])
    before = batch.cache.keys[1].clone()
    batch.attend(form)
    slots = batch.slots()[: batch.num_rows]
    keys = batch.rotation(batch.queries_and_keys)[: batch.num_rows, 9:]
    assert (batch.cache.keys[1][:, slots].transpose(0, 1) - keys).abs().max() < 1e-6
    assert torch.equal(batch.cache.values[1][:, slots].transpose(0, 1), batch.values[: batch.num_rows])
    untouched = torch.ones(batch.cache.num_slots, dtype=torch.bool)
    untouched[slots] = untouched[batch.cache.padding_slot] = False
    assert torch.equal(batch.cache.keys[1][:, untouched], before[:, untouched])


def test_large_scores_do_not_overflow():
    heads = Heads(4, 2, 32, 100.0)
    batch = Batch(heads, [(130, 3, 80)])
    output = batch.attend("compiled")
    assert output.isfinite().all() and (output.double() - batch.expected()).abs().max() < 1e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["query", "key"])
def test_what_is_not_a_number_stays_visible(form, place):
    batch = Batch(Heads(4, 2, 32, 0.2), [(70, 2, 3), (5, 1, 2)])
    batch.queries_and_keys[1, 0 if place == "query" else 4, 0] = float("nan")
    output = batch.attend(form).unflatten(1, (4, 32))
    assert output[1, 0].isnan().all() and output[0].isfinite().all() and output[2].isfinite().all()


@pytest.mark.parametrize("heads", [Heads(4, 2, 24, 0.2), Heads(34, 2, 16, 0.25)], ids=["dim", "repeats"])
def test_shapes_that_the_kernel_does_not_know_use_torch_operators(heads):
    assert isinstance(decoding_for(heads, CPU), TorchDecoding)


def test_a_kernel_that_is_switched_off_is_not_used(monkeypatch):
    monkeypatch.setenv("POLYRHYTHM_KERNELS", "off:decode")
    assert isinstance(decoding_for(Heads(4, 2, 16, 0.25), CPU), TorchDecoding)
