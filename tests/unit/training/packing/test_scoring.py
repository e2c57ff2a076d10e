import logging

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from polyrhythm.errors import RunError, UserError
from polyrhythm.training.packing import scoring
from polyrhythm.training.packing.layout import pack
from polyrhythm.training.packing.scoring import prepare_model, score
from polyrhythm.weights.logits import LogitsRule

GROUPS = [([1, 2, 3, 4, 5, 6, 7], [[8, 9], [10, 11, 12], [13]]), ([14, 15], [[16], [17, 18, 19, 20, 21, 22, 23]])]

SHAPE = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.3,
    max_position_embeddings=64,
    pad_token_id=0,
)


def build(name: str, **options: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **options})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def linear_attention_model() -> PreTrainedModel:
    return build(
        "Qwen3Next",
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        mlp_only_layers=[0, 1],
    )


UNSHARABLE = {
    "attention_dropout=0.1": lambda: build("Llama", attention_dropout=0.1),
    "linear_attention": linear_attention_model,
}


@pytest.mark.parametrize("reason", list(UNSHARABLE))
def test_what_cannot_be_shared_says_why_and_is_still_scored_exactly(reason, one_by_one, caplog):
    model = UNSHARABLE[reason]()
    with caplog.at_level(logging.WARNING):
        assert prepare_model(model, "auto") is False
    assert reason in caplog.text
    model.eval()
    (layout,) = pack(GROUPS, share_prompt=False, max_tokens=999)
    assert torch.allclose(score(model, layout).logprobs_N, one_by_one(model, GROUPS, layout), atol=2e-5)


@pytest.mark.parametrize("reason", ["attention_dropout=0.1", "linear_attention"])
def test_always_sharing_what_cannot_be_shared_is_an_error(reason):
    with pytest.raises(UserError, match=reason):
        prepare_model(UNSHARABLE[reason](), "always")


def test_never_sharing_is_silent(caplog):
    assert prepare_model(build("Llama"), "never") is False
    assert caplog.text == ""


def test_logits_that_are_changed_after_the_head_in_an_unknown_way_are_refused(monkeypatch):
    monkeypatch.setattr(scoring, "logits_rule", lambda config: LogitsRule())
    with pytest.raises(UserError, match="cannot be trained"):
        prepare_model(build("Granite", logits_scaling=3.0), "auto")


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_frequencies_that_depend_on_neighbours_are_refused(rope_type):
    lengths = {
        "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
    }
    rope = {"rope_type": rope_type, "rope_theta": 10_000.0, "factor": 2.0, **lengths.get(rope_type, {})}
    with pytest.raises(UserError, match=f"rope_type='{rope_type}'"):
        prepare_model(build("Llama", rope_parameters=rope), "never")


def test_weights_in_half_precision_are_refused():
    with pytest.raises(UserError, match=r"bfloat16.*dtype=torch\.float32"):
        prepare_model(build("Llama").to(torch.bfloat16), "auto")


def test_a_model_with_an_attention_of_its_own_is_refused_by_name():
    with pytest.raises(UserError, match=r"Bloom.* cannot be trained"):
        prepare_model(build("Bloom"), "auto")


def test_a_layout_that_reaches_another_attention_backend_is_an_error():
    model = build("Llama")
    prepare_model(model, "auto")
    model.set_attn_implementation("sdpa")
    with pytest.raises(RunError, match="0 of 2 layers"):
        score(model, pack(GROUPS, share_prompt=True, max_tokens=999)[0])


def test_preparing_twice_changes_nothing():
    model = build("Llama")
    assert prepare_model(model, "auto") and prepare_model(model, "auto")


@pytest.mark.parametrize("training", [True, False])
def test_preparing_leaves_the_train_mode_as_it_was(training):
    model = build("Llama").train(training)
    prepare_model(model, "auto")
    assert model.training is training


def test_temperature_flattens_the_distribution_that_is_scored(one_by_one):
    model = build("Llama")
    prepare_model(model, "auto")
    (layout,) = pack(GROUPS, share_prompt=True, max_tokens=999)
    cold, warm = score(model, layout, temperature=0.5), score(model, layout, temperature=2.0)
    assert (warm.entropy_N > cold.entropy_N).all()
    with torch.no_grad():
        model.get_output_embeddings().weight /= 2.0
    assert torch.allclose(one_by_one(model, GROUPS, layout), warm.logprobs_N, atol=1e-5)
