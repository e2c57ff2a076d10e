"""Gradients added in place are those that autograd would have added."""

import copy
import json

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from polyrhythm.config import load_config
from polyrhythm.errors import UserError
from polyrhythm.training.packing.layout import pack
from polyrhythm.training.packing.scoring import prepare_model, score
from polyrhythm.training.policy.accumulate import accumulate_in_place
from polyrhythm.training.policy.saving import save_policy
from polyrhythm.training.policy.tri_model import TriModel, load_policy
from tests.conftest import build_tiny_model
from tests.tiny_model import save_tiny_model


def gradients(model: torch.nn.Module, *batches: torch.Tensor) -> dict[str, torch.Tensor]:
    for batch in batches:
        model(batch).logits.square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_sums_over_several_passes_are_those_of_autograd(kind, checkpointing):
    plain = build_tiny_model(kind)  # qwen2 has biases; llama and qwen3 tie the head to the embedding
    changed = copy.deepcopy(plain)
    accumulate_in_place(changed)
    if checkpointing:
        changed.train()
        changed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batches = [torch.randint(0, 96, (2, length)) for length in (7, 3)]
    expected, actual = gradients(plain, *batches), gradients(changed, *batches)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= 2e-6 * gradient.norm(), name


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_sums_of_scored_rows_are_those_of_autograd(kind):
    plain = build_tiny_model(kind)
    prepare_model(plain, "always")
    changed = copy.deepcopy(plain)
    accumulate_in_place(changed)
    rows = pack([([1, 2, 3], [[4, 5], [6]]), ([7], [[8, 9, 10], [11]])], share_prompt=True, max_tokens=5)
    assert len(rows) > 1
    for model in (plain, changed):
        for row in rows:
            score(model, row).logprobs_N.sum().backward()
    for (name, expected), actual in zip(plain.named_parameters(), changed.parameters(), strict=True):
        assert (actual.grad - expected.grad).norm() <= 2e-6 * expected.grad.norm(), name


def test_a_frozen_layer_gets_no_gradient():
    model = build_tiny_model("llama")
    frozen = model.model.layers[0].mlp.up_proj
    frozen.weight.requires_grad_(False)
    accumulate_in_place(model)
    gradients(model, torch.tensor([[1, 2, 3]]))
    assert frozen.weight.grad is None
    assert model.model.layers[0].mlp.down_proj.weight.grad is not None


def test_checkpointing_a_model_with_dropout_is_refused():
    model = build_tiny_model("llama")
    model.config.attention_dropout = 0.1
    config = load_config([], {"training": {"gradient_checkpointing": True}})
    with pytest.raises(UserError, match=r"attention_dropout=0\.1"):
        TriModel(model, config.training, config.algorithm, temperature=1.0)


def test_dropout_by_any_name_is_refused_when_layers_are_checkpointed():
    config = OPTConfig(vocab_size=96, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=32,
                       dropout=0.1, attention_dropout=0.0)  # fmt: skip
    run = load_config([], {"training": {"gradient_checkpointing": True}})
    with pytest.raises(UserError, match=r"the model's dropout=0\.1"):
        TriModel(OPTForCausalLM(config), run.training, run.algorithm, temperature=1.0)


def test_a_model_whose_settings_for_generation_could_not_be_saved_is_saved_all_the_same(tmp_path):
    model_dir, saved = tmp_path / "given", tmp_path / "saved"
    save_tiny_model(model_dir)
    (model_dir / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    save_policy(policy := load_policy(model_dir), model_dir, saved, "auto")
    settings = json.loads((saved / "generation_config.json").read_text())
    assert (settings["temperature"], settings["do_sample"]) == (0.6, True)
    for ours, theirs in zip(load_policy(saved).parameters(), policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_weights_that_the_checkpoint_lacks_are_not_drawn_at_random(tmp_path):
    save_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(UserError, match=r"lacks the weights of model\.layers\.2.*, one of 9 tensors"):
        load_policy(tmp_path)


def test_settings_for_generation_that_mean_nothing_are_told_before_training(tmp_path):
    save_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"length_penalty": 2.0}')
    with pytest.raises(UserError, match=r"generation_config\.json"):
        load_policy(tmp_path)


def test_checkpointing_recomputes_layers_and_leaves_what_is_inside_in_evaluation_mode():
    model = build_tiny_model("llama")
    config = load_config([], {"training": {"gradient_checkpointing": True}})
    policy = TriModel(model, config.training, config.algorithm, temperature=1.0).policy
    num_passes = []
    policy.model.layers[0].input_layernorm.register_forward_hook(lambda *_: num_passes.append(1))
    (layout,) = pack([([1, 2, 3], [[4, 5], [6]])], share_prompt=True, max_tokens=99)
    score(policy, layout).logprobs_N.sum().backward()
    assert len(num_passes) == 2, "once forward, once again for the backward pass"
    assert not policy.model.layers[0].mlp.training
