"""The probe finds weights that are loaded and not computed with, one stale tensor at a time."""

import math
from pathlib import Path

import msgspec
import pytest
import torch

from polyrhythm.config import AlgorithmConfig, EngineConfig, TrainingConfig
from polyrhythm.engine.embedded.engine import InferenceEngine
from polyrhythm.engine.embedded.projection import Projection
from polyrhythm.errors import RunError
from polyrhythm.training.policy.tri_model import TriModel
from polyrhythm.weights.export import exported, named_weights
from polyrhythm.weights.proof import TOLERANCES, ProofFailed, canary_columns, check_proof, make_probe, probe_of
from polyrhythm.weights.proof import negate_for_canary as negate
from polyrhythm.weights.snapshot import Probe
from polyrhythm.weights.store import WeightStore
from tests.conftest import VOCABULARY, build_tiny_model
from tests.publishing import own_logprobs, publish
from tests.unit.engine.conftest import MODELS, VOCAB_SIZE, build_model


def bytes_of(model) -> list[bytes]:
    return [tensor.contiguous().numpy().tobytes() for tensor in named_weights(model).values()]


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_a_canary_shows_every_tensor_that_stays_as_it_was(kind):
    model = build_model(kind)  # its biases are not zero: what is zero has no sign to show
    weights = named_weights(model)
    probe = make_probe(
        3, VOCAB_SIZE, list(exported(model)), lambda sequences: own_logprobs(model, sequences), "float32"
    )
    for stale in weights:
        loaded = {name: tensor for name, tensor in weights.items() if name != stale}
        negate(loaded, probe.seed)
        with pytest.raises(ProofFailed, match="the canary of weights v3"):
            check_proof(3, probe, own_logprobs(model, probe.sequences), "float32", is_canary=True)
        negate(loaded, probe.seed)
    check_proof(3, probe, own_logprobs(model, probe.sequences), "float32", is_canary=False)


def test_making_a_probe_leaves_the_policy_as_it_was_to_the_last_bit():
    training = TrainingConfig(gradient_checkpointing=True)
    models = TriModel(build_tiny_model("qwen3"), training, AlgorithmConfig(), temperature=0.7)  # pyright: ignore
    before, attention = bytes_of(models.policy), models.policy.config._attn_implementation
    modes = [module.training for module in models.policy.modules()]
    probe = probe_of(models.policy, 5)
    assert bytes_of(models.policy) == before
    assert models.policy.config._attn_implementation == attention
    assert [module.training for module in models.policy.modules()] == modes and True in modes and False in modes
    expected = own_logprobs(build_tiny_model("qwen3"), probe.sequences)
    check_proof(5, probe, expected, "float32", is_canary=False)  # temperature is how to draw, not what the weights are
    gap = max(abs(a - b) for a, b in zip(probe.logprobs, probe.canary_logprobs, strict=True))
    assert gap > 100 * TOLERANCES["float32"], "a canary is visibly different"


def test_weights_are_restored_even_if_scoring_the_canary_fails():
    model = build_tiny_model("llama")
    before, calls = bytes_of(model), []

    def logprobs_of(sequences) -> list[float]:
        calls.append(bytes_of(model) == before)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return own_logprobs(model, sequences)

    with pytest.raises(RuntimeError):
        make_probe(0, VOCABULARY, list(exported(model)), logprobs_of, "float32")
    assert calls == [True, False] and bytes_of(model) == before


def test_each_version_has_tokens_and_columns_of_its_own():
    model = build_tiny_model("llama")
    probes = [
        make_probe(v, VOCABULARY, [], lambda sequences: own_logprobs(model, sequences), "float32") for v in (0, 1, 1)
    ]
    assert probes[0].sequences != probes[1].sequences and probes[1] == probes[2]
    shape = (99, 576)
    assert canary_columns(0, "a", shape) != canary_columns(1, "a", shape) != canary_columns(1, "b", shape)
    start, num = canary_columns(7, "a", shape)
    assert 0 <= start <= 576 - num and num == 18
    assert canary_columns(7, "bias", (1,)) == (0, 1)


def test_a_policy_that_computes_nothing_finite_ends_the_run_and_says_so():
    model = build_tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    with pytest.raises(RunError, match="weights v4 give log-probabilities that are not finite: training has diverged"):
        make_probe(4, VOCABULARY, list(exported(model)), lambda sequences: own_logprobs(model, sequences), "float32")


@pytest.mark.parametrize(("number_format", "gap"), [("bfloat16", 0.4), ("float16", 0.09), ("float32", 0.0009)])
def test_how_far_apart_is_too_far_depends_on_the_number_format(number_format, gap):
    probe = Probe(0, [[1, 2, 3]], [-5.0, -7.0], [-6.0, -8.0], "float32")
    check_proof(0, probe, [-5.0 + gap, -7.0], number_format, is_canary=False)
    by_trainer = msgspec.structs.replace(probe, number_format=number_format)
    check_proof(0, by_trainer, [-5.0 + gap, -7.0], "float32", is_canary=False)
    for wrong in ([-5.0, -7.0 + 1.3 * gap], [-5.0, math.nan], [-5.0]):
        with pytest.raises(ProofFailed):
            check_proof(0, probe, wrong, number_format, is_canary=False)


async def test_an_engine_whose_packed_head_stays_behind_is_refused_when_it_joins(tmp_path: Path, monkeypatch):
    model = build_tiny_model("qwen3")
    model.save_pretrained(tmp_path / "model")
    store = WeightStore(tmp_path / "weights")
    publish(store, model, 0)  # the very weights the engine starts with: only the canary can tell
    refresh = Projection.refresh
    async with InferenceEngine(tmp_path / "model", EngineConfig(threads=1, kv_tokens=400), store=store) as engine:
        head = engine._runner._head
        monkeypatch.setattr(Projection, "refresh", lambda self: None if self is head else refresh(self))
        with pytest.raises(ProofFailed, match="the canary of weights v0 are loaded but not what is computed"):
            await engine.load(0)
        assert engine.status().policy_version == -1
        monkeypatch.setattr(Projection, "refresh", refresh)
        await engine.load(0)
        assert engine.status().policy_version == 0
