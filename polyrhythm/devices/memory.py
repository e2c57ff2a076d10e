"""What a model takes, before anything is loaded: computed from the files in its folder, for each kind of process.

Weights, gradients and moments are exact. Activations are an estimate of what autograd keeps between the passes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyrhythm.config import Config

Parts = dict[str, int]
"""Bytes by what they are for."""
FP32 = 4
NUMBER_BYTES = {"auto": FP32, "float32": FP32, "bfloat16": 2}
"""By `dtype`; a run without an accelerator has not to decide what auto is."""
KV_MEMORY_SHARE = 0.25
"""Of the free memory: the cache of an embedded engine never takes more by default."""
LOGITS = 512 * 2**20
"""Of the tiles of logits that are computed and kept, at most (training/packing/logprobs.py)."""
CONTEXT = 600 * 2**20
"""What a process takes on an accelerator before its first tensor: the context and the kernels."""


@dataclass(frozen=True)
class ModelShape:
    """Of a decoder, as far as it says how much memory it takes."""

    num_parameters: int
    num_layers: int
    hidden: int
    intermediate: int
    """Of all experts that a token visits."""
    attention: int
    """Query heads times their size."""
    key_value: int
    """Key and value heads times their size."""
    context_length: int
    num_outside_layers: int = 0
    """Parameters of the embedding, the head and the last norm."""

    @property
    def num_in_a_layer(self) -> int:
        return (self.num_parameters - self.num_outside_layers) // max(1, self.num_layers)

    @classmethod
    def of_folder(cls, folder: Path) -> "ModelShape":
        content = json.loads((folder / "config.json").read_text())
        config = content.get("text_config", content)
        number = _Numbers(config)
        hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head", or_else=1)
        head_dim = config.get("head_dim") or hidden // heads
        experts = config.get("num_experts_per_tok") or 1
        width = config.get("moe_intermediate_size") or number(
            "intermediate_size", "ffn_dim", "n_inner", or_else=4 * hidden
        )
        return cls(
            num_parameters=count_parameters(folder),
            num_outside_layers=count_parameters(folder, is_counted=_is_outside_layers),
            num_layers=number("num_hidden_layers", "n_layer"),
            hidden=hidden,
            intermediate=experts * width,
            attention=heads * head_dim,
            key_value=2 * (config.get("num_key_value_heads") or heads) * head_dim,
            context_length=number("max_position_embeddings", "n_positions", or_else=2048),
        )


class _Numbers:
    """Architectures call the same number differently."""

    def __init__(self, config: dict[str, Any]):
        self._config = config

    def __call__(self, *names: str, or_else: int = 0) -> int:
        return next((int(self._config[name]) for name in names if self._config.get(name)), or_else)


def count_parameters(folder: Path, is_counted: Callable[[str], bool] = lambda name: True) -> int:
    """From the headers of the weight files, by name; a tied head is in them once."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        total += sum(
            _product(entry["shape"]) for name, entry in header.items() if name != "__metadata__" and is_counted(name)
        )
    return total


def _is_outside_layers(name: str) -> bool:
    """Layers are numbered."""
    return not any(part.isdigit() for part in name.split("."))


def _product(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def snapshot_bytes(config: Config, model_dir: Path) -> int:
    """Of one version of the policy, as engines get it."""
    return NUMBER_BYTES[config.dtype] * count_parameters(model_dir)


def trainer_memory(config: Config, shape: ModelShape, *, on_device: bool = False) -> Parts:
    """Of one rank, where its policy is; on a device without what has been moved to the host."""
    if config.training.is_sharded:
        return _sharded_memory(config, shape, on_device=on_device)
    width, full = NUMBER_BYTES[config.dtype], FP32 * shape.num_parameters
    weights = width * shape.num_parameters
    parts = {"weights": weights, "gradients": full}
    if not (on_device and config.training.offload_optimizer):
        parts |= {"masters": full} if width != FP32 else {}
        parts["moments"] = 2 * full
    if config.algorithm.kl_coef > 0:
        parts["reference"] = weights
    if config.training.updates_per_step > 1:
        parts["old policy"] = weights
    parts["activations"] = activation_memory(config, shape) + LOGITS
    return parts


def _sharded_memory(config: Config, shape: ModelShape, *, on_device: bool) -> Parts:
    """Of one rank that holds some rows of what an update changes; docs/ranks.md has the formula."""
    training, width, num = config.training, NUMBER_BYTES[config.dtype], shape.num_parameters
    num_rows = (
        num * training.num_replicas // training.num_ranks if training.parallel == "shard" else num // training.num_ranks
    )
    copies = width * num
    parts = {"rows of weights, gradients and moments": 4 * FP32 * num_rows}
    if on_device and training.offload_optimizer:
        parts = {}
    if training.parallel == "shard_state":
        parts |= {"weights": width * num, "gradients": FP32 * num}
    else:
        copies = width * num_rows
        parts["layers in use"] = (width + FP32) * (shape.num_outside_layers + shape.num_in_a_layer)
    if config.algorithm.kl_coef > 0:
        parts["reference"] = copies
    if training.updates_per_step > 1:
        parts["old policy"] = copies
    parts["activations"] = activation_memory(config, shape) + LOGITS
    return parts


def offloaded_memory(config: Config, shape: ModelShape) -> Parts:
    """What a rank on a device has on the host."""
    full = FP32 * shape.num_parameters
    if config.training.offload_optimizer and config.training.is_sharded:
        return {"rows": _sharded_memory(config, shape, on_device=False)["rows of weights, gradients and moments"]}
    return {"masters": full, "moments": 2 * full, "gradients": full} if config.training.offload_optimizer else {}


def activation_memory(config: Config, shape: ModelShape) -> int:
    """What autograd keeps of a full micro-batch, all layers; with checkpointing, their inputs and one layer."""
    # Counted in a Llama of torch operators; keys and values once more, because accelerators gather them.
    one_layer = 6 * shape.hidden + 2 * shape.attention + 2 * shape.key_value + 4 * shape.intermediate
    kept = shape.num_layers * one_layer
    if config.training.gradient_checkpointing:
        kept = shape.num_layers * shape.hidden + one_layer
    return NUMBER_BYTES[config.dtype] * config.training.tokens_per_micro_batch * kept


def engine_memory(config: Config, shape: ModelShape, available: int) -> Parts:
    """Of one embedded engine on a device with so many bytes available."""
    context = min(config.engine.context_length or shape.context_length, shape.context_length)
    per_token = FP32 * shape.num_layers * shape.key_value
    slots = config.engine.kv_tokens or default_kv_tokens(available, per_token, config.engine.max_batch, context)
    return {"weights": FP32 * shape.num_parameters, "cache": slots * per_token}


def default_kv_tokens(available: int, bytes_per_token: int, max_batch: int, context_length: int) -> int:
    """Room for a full batch of the longest sequences, if a share of the memory has it."""
    affordable = int(available * KV_MEMORY_SHARE) // bytes_per_token
    return max(min(max_batch * context_length, affordable), 1)


def in_words(parts: Parts) -> str:
    """12.3 GB (weights 2.0, gradients 2.0, ...)"""
    each = ", ".join(f"{what} {gigabytes(num_bytes)}" for what, num_bytes in parts.items())
    return f"{gigabytes(sum(parts.values()))} GB ({each})"


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f}"
