"""What leaves the trainer: names, number format, rows."""

import pytest
import torch

from polyrhythm.weights.export import exported, named_weights
from polyrhythm.weights.snapshot import SnapshotError
from polyrhythm.weights.store import WeightStore
from tests.conftest import build_tiny_model


def test_a_policy_is_exported_under_the_names_that_an_engine_asks_for_with_tied_weights_once():
    policy, engine = build_tiny_model("llama"), build_tiny_model("llama", seed=1)
    rows = list(exported(policy))
    assert [row.name for row in rows] == list(named_weights(engine))
    assert "lm_head.weight" not in named_weights(engine)
    assert all(row.is_whole and row.shape == tuple(named_weights(engine)[row.name].shape) for row in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exporting_copies_nothing_and_keeps_the_number_format(dtype):
    policy = build_tiny_model("llama").to(dtype)
    places = {tensor.data_ptr() for tensor in named_weights(policy).values()}
    assert {row.rows.data_ptr() for row in exported(policy)} == places
    assert {row.published_dtype for row in exported(policy)} == {dtype}


def test_what_engines_do_not_load_is_rounded_to_fp32(tmp_path):
    policy = build_tiny_model("llama").double()
    store = WeightStore(tmp_path)
    store.publish(exported(policy), 0)
    store.load_into(loaded := named_weights(build_tiny_model("llama", seed=1)), 0)
    assert all(torch.equal(loaded[name], tensor.float()) for name, tensor in named_weights(policy).items())


def test_an_engine_in_fp32_loads_a_version_in_bf16(tmp_path):
    policy = build_tiny_model("llama").bfloat16()
    store = WeightStore(tmp_path)
    folder = store.publish(exported(policy), 0)
    assert {entry.dtype for entry in store.manifest(0).tensors.values()} == {"BF16"}
    assert (folder / "model.safetensors").stat().st_size < 2.2 * sum(p.numel() for p in policy.parameters())
    store.load_into(loaded := named_weights(build_tiny_model("llama", seed=1)), 0)
    assert all(torch.equal(loaded[name], tensor.float()) for name, tensor in named_weights(policy).items())
    with pytest.raises(SnapshotError, match="digests differ"):
        store.verify(exported(build_tiny_model("llama", seed=1).bfloat16()), 0)
    with pytest.raises(SnapshotError, match=r"BF16.* in weights v0, the model has F16"):
        store.load_into(named_weights(build_tiny_model("llama").half()), 0)
