"""What leaves the trainer: names, number format, rows."""

import torch

from polyrhythm.weights.export import exported, named_weights
from tests.conftest import build_tiny_model


def test_a_policy_is_exported_under_the_names_that_an_engine_asks_for_with_tied_weights_once():
    policy, engine = build_tiny_model("llama"), build_tiny_model("llama", seed=1)
    rows = list(exported(policy))
    assert [row.name for row in rows] == list(named_weights(engine))
    assert "lm_head.weight" not in named_weights(engine)
    assert all(row.is_whole and row.shape == tuple(named_weights(engine)[row.name].shape) for row in rows)


def test_exporting_copies_nothing_where_the_format_is_right_and_widens_what_is_narrow():
    policy = build_tiny_model("llama")
    places = {tensor.data_ptr() for tensor in named_weights(policy).values()}
    assert {row.rows.data_ptr() for row in exported(policy)} == places
    assert {row.rows.dtype for row in exported(policy.to(torch.bfloat16))} == {torch.float32}
