"""A policy that computes in bfloat16 beside one in fp32 with the same rounded weights; its masters are what is trained."""

import copy

import pytest
import torch

from polyrhythm.config import Config, load_config
from polyrhythm.training.checkpoint import Checkpoints
from polyrhythm.training.trainer import Trainer
from polyrhythm.types import MicroBatch
from polyrhythm.weights.export import exported
from polyrhythm.weights.proof import probe_of
from tests.architectures import build_architecture
from tests.conftest import build_tiny_model, make_group

FAMILIES = ["gemma3_text", "gpt2", "gpt_oss", "llama", "olmoe", "qwen3"]
"""Windows, soft caps, sinks, experts, biases, tied heads; of all tested architectures these differ most and least."""


def config_in(dtype: str, **keys) -> Config:
    return load_config([], {"dtype": dtype, "num_steps": 4, "training": {"learning_rate": 1e-3}, **keys})


def rounded_model(family: str):
    """Every weight is a bf16 number, so that both formats begin with the same policy."""
    model = build_architecture(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def forward_backward(trainer: Trainer, version: int = 0, num_groups: int = 2) -> None:
    trainer.begin_step(version)
    for index in range(num_groups):  # several micro-batches: their gradients are summed
        groups = [make_group(index, step=version)]
        trainer.forward_backward(MicroBatch(version=version, groups=groups, advantages=[[1.0, -1.0, 0.5, -0.5]]))


def gradients(trainer: Trainer) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in trainer.optimizer.gradients()])


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in trainer.optimizer.names])


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_gradients_and_the_update_are_those_of_fp32_within_bf16_rounding(family):
    full, half = (Trainer(config_in(dtype), rounded_model(family)) for dtype in ("float32", "bfloat16"))
    assert {parameter.dtype for parameter in half.policy.parameters()} == {torch.bfloat16}
    for trainer in (full, half):
        forward_backward(trainer)
    ours, theirs = gradients(half), gradients(full)
    assert ours.dtype == torch.float32
    assert torch.linalg.vector_norm(ours - theirs) < 0.06 * torch.linalg.vector_norm(theirs)
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.998
    assert half.metrics()["train/entropy"] == pytest.approx(full.metrics()["train/entropy"], rel=0.01)
    for trainer in (full, half):
        trainer.optim_step()
    assert all(torch.equal(parameter, master.bfloat16()) for parameter, master in half.models.masters.items())
    assert (weights(half) - weights(full)).abs().max() < 2.1e-3, "an update of Adam is at most the rate, each way"


def test_small_updates_are_not_lost_in_rounding():
    config = config_in("bfloat16", training={"learning_rate": 1e-6})
    trainer = Trainer(config, rounded_model("llama"))
    before = weights(trainer).clone()
    for version in range(4):
        forward_backward(trainer, version)
        trainer.optim_step()
    moved = (weights(trainer) - before).abs()
    assert 0 < moved.max() <= 4.1e-6, "the masters add up what bf16 weights could not show"


@pytest.mark.parametrize(
    "options", [{"gradient_checkpointing": True}, {"updates_per_step": 2}, {"offload_optimizer": True}]
)
def test_options_give_the_same_gradient_in_bf16(options):
    plain = Trainer(config_in("bfloat16"), rounded_model("qwen3"))
    other = Trainer(config_in("bfloat16", training={"learning_rate": 1e-3, **options}), rounded_model("qwen3"))
    for trainer in (plain, other):
        forward_backward(trainer)
    assert torch.equal(gradients(plain), gradients(other))


def test_the_reference_and_what_engines_get_are_the_rounded_policy():
    config = config_in("bfloat16", algorithm={"kl_coef": 0.1})
    trainer = Trainer(config, build_tiny_model("llama"))
    forward_backward(trainer)
    assert trainer.metrics()["kl/k1"] == 0
    trainer.optim_step()
    sent = {rows.name: rows.rows for rows in exported(trainer.policy)}
    named = dict(trainer.policy.named_parameters())
    assert all(torch.equal(tensor.float(), named[name].float()) for name, tensor in sent.items() if name in named)


def test_a_bf16_run_goes_on_from_a_checkpoint_of_its_masters_with_the_same_bits(tmp_path):
    config, initial = config_in("bfloat16"), build_tiny_model("qwen3")
    whole = Trainer(config, copy.deepcopy(initial))
    for version in range(4):
        forward_backward(whole, version)
        whole.optim_step()
        if version == 1:
            Checkpoints(tmp_path, whole).save(2)
    resumed = Trainer(config, copy.deepcopy(initial))
    Checkpoints(tmp_path, resumed).load(2)
    for version in (2, 3):
        forward_backward(resumed, version)
        resumed.optim_step()
    assert torch.equal(weights(resumed), weights(whole))
    kept = weights(whole).clone()
    saved = torch.cat([parameter.flatten() for parameter in whole.models.full_policy().parameters()])
    assert torch.equal(saved, kept), "the model that is saved has all digits"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_engines_must_prove_is_computed_in_fp32_with_the_rounded_weights(family):
    full, half = (Trainer(config_in(dtype), rounded_model(family)) for dtype in ("float32", "bfloat16"))
    expected, probe = probe_of(full.policy, version=3), probe_of(half.policy, version=3)
    assert probe.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert probe.canary_logprobs == pytest.approx(expected.canary_logprobs, abs=1e-4)
    assert {parameter.dtype for parameter in half.policy.parameters()} == {torch.bfloat16}, "as it was"
