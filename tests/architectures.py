"""Tiny random models of the decoder architectures of transformers, each with what is special about it switched on."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.tiny_model import byte_tokenizer

VOCABULARY = 264
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, eos_token_id=0, pad_token_id=0, bos_token_id=None,
)  # fmt: skip
WINDOW = {"sliding_window": 9}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
GPT2_SHAPE = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": WINDOW,
    "phi3": {"partial_rotary_factor": 0.5},
    "phi": {"partial_rotary_factor": 0.5},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 20, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo": {},
    "olmo2": {},
    "olmo3": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {
        "embedding_multiplier": 2.0,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "cohere": {"logit_scale": 0.3, "use_qk_norm": True},
    "cohere2": {**WINDOW, "logit_scale": 0.3, "layer_types": ["sliding_attention", "full_attention"]},
    "starcoder2": {**WINDOW, "use_bias": True},
    "gpt_neox": {"rotary_pct": 0.25, "use_parallel_residual": True},
    "gpt2": GPT2_SHAPE,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**EXPERTS, "num_experts": 4},
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "olmoe": {**EXPERTS, "num_experts": 4},
    "gpt_oss": {
        **WINDOW, **EXPERTS, "num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "exaone4": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "helium": {},
}  # fmt: skip


def build_architecture(kind: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """Weights large enough for distributions that are not flat, and biases, norms and sinks that are not trivial."""
    config = AutoConfig.for_model(kind, **{**SHAPE, **ARCHITECTURES[kind], **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        is_small = parameter.dim() == 1 or name.endswith("bias")
        spread = 0.3 if is_small else 1.0 / parameter.shape[-1] ** 0.5
        centre = 1.0 if "norm" in name and name.endswith("weight") and parameter.dim() == 1 else 0.0
        parameter.data = torch.randn(parameter.shape, generator=generator) * spread + centre
    model.tie_weights()
    return model


def save_architecture(kind: str, folder: Path, **options: Any) -> PreTrainedModel:
    model = build_architecture(kind, **options)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model
