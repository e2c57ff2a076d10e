"""The memory plan against what a model really takes."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from polyrhythm.config import load_config
from polyrhythm.devices.memory import (
    ModelShape,
    activation_memory,
    default_kv_tokens,
    engine_memory,
    in_words,
    offloaded_memory,
    snapshot_bytes,
    trainer_memory,
)
from polyrhythm.engine.embedded.model_runner import load_runner
from polyrhythm.training.packing.layout import pack
from polyrhythm.training.packing.scoring import prepare_model, score
from polyrhythm.training.policy.accumulate import accumulate_in_place
from tests.tiny_model import save_tiny_model


def test_weights_and_cache_are_those_of_the_loaded_model(tmp_path):
    shape = ModelShape.of_folder(save_tiny_model(tmp_path))
    runner = load_runner(tmp_path)
    assert shape.num_parameters == sum(p.numel() for p in runner.model.parameters())
    config = load_config([], {"engine": {"kv_tokens": 1000}})
    assert engine_memory(config, shape, 10**9)["cache"] == 1000 * runner.kv_bytes_per_token
    trainer = trainer_memory(load_config([], {"algorithm": {"kl_coef": 0.1}}), shape)
    assert trainer["weights"] == trainer["reference"] == 4 * shape.num_parameters
    assert trainer["moments"] == 2 * trainer["gradients"] == 8 * shape.num_parameters


def test_in_bf16_weights_and_copies_take_half_and_masters_are_beside_them(tmp_path):
    shape = ModelShape.of_folder(save_tiny_model(tmp_path))
    half = {"dtype": "bfloat16", "algorithm": {"kl_coef": 0.1}}
    config = load_config([], half)
    trainer = trainer_memory(config, shape)
    assert trainer["weights"] == trainer["reference"] == 2 * shape.num_parameters == snapshot_bytes(config, tmp_path)
    assert trainer["masters"] == trainer["gradients"] == 4 * shape.num_parameters
    offloading = load_config([], half | {"training": {"offload_optimizer": True}})
    assert trainer_memory(offloading, shape) == trainer, "without a device there is nowhere to move it to"
    on_device, on_host = trainer_memory(offloading, shape, on_device=True), offloaded_memory(offloading, shape)
    assert "masters" not in on_device and "moments" not in on_device
    assert on_host == {what: trainer[what] for what in ("masters", "moments", "gradients")}


def test_activations_are_what_autograd_keeps(tmp_path, monkeypatch):
    """Within a third: the estimate has keys and values twice, as accelerators do."""
    monkeypatch.setenv("POLYRHYTHM_KERNELS", "off")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    model.save_pretrained(tmp_path)
    prepare_model(model, "auto")
    accumulate_in_place(model)
    (layout,) = pack([(list(range(40)), [[1] * 61] * 4)], share_prompt=True, max_tokens=1000)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in weights:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        score(model, layout)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    config = load_config([], {"training": {"tokens_per_micro_batch": layout.num_tokens}})
    assert 0.75 < measured / activation_memory(config, ModelShape.of_folder(tmp_path)) < 1.33


def test_the_cache_takes_a_share_of_the_memory_at_most():
    assert default_kv_tokens(10**12, bytes_per_token=100, max_batch=4, context_length=50) == 200
    assert default_kv_tokens(4000, bytes_per_token=100, max_batch=4, context_length=50) == 10


def test_parts_are_told_in_gigabytes():
    assert in_words({"weights": 2 * 10**9, "cache": 3 * 10**8}) == "2.3 GB (weights 2.0, cache 0.3)"


def test_a_rank_takes_what_training_parallel_leaves_it(tmp_path):
    """Per parameter: 16 bytes replicated, 8 + 16/N with a sharded state, 16/N and the layers in use sharded."""
    shape = ModelShape.of_folder(save_tiny_model(tmp_path))
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    one_layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert shape.num_in_a_layer == one_layer
    assert shape.num_outside_layers == shape.num_parameters - 2 * one_layer

    def bytes_of(dtype="float32", **training) -> float:
        parts = trainer_memory(load_config([], {"dtype": dtype, "training": {"num_ranks": 4, **training}}), shape)
        return sum(size for what, size in parts.items() if what != "activations")

    count, in_use = shape.num_parameters, 8 * (shape.num_outside_layers + one_layer)
    assert bytes_of() == 16 * count
    assert bytes_of(parallel="shard_state") == (8 + 16 / 4) * count
    assert bytes_of(parallel="shard") == 16 / 4 * count + in_use
    assert bytes_of(parallel="shard", ranks_per_replica=2) == 16 / 2 * count + in_use
    assert bytes_of("bfloat16", parallel="shard_state") == (6 + 16 / 4) * count
    assert bytes_of("bfloat16", parallel="shard") == 16 / 4 * count + 6 / 8 * in_use
