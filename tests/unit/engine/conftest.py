"""Tiny models in folders of their own, with a tokenizer whose tokens are bytes."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 300
EOS = 299
_SHAPE = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=1024,
    eos_token_id=EOS,
    bos_token_id=None,
    pad_token_id=None,
)
MODELS = {
    "llama-gqa": (LlamaForCausalLM, LlamaConfig(**_SHAPE, num_key_value_heads=2)),
    "llama-mha": (LlamaForCausalLM, LlamaConfig(**_SHAPE, num_key_value_heads=4, tie_word_embeddings=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**_SHAPE, num_key_value_heads=1)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_SHAPE, num_key_value_heads=2, head_dim=32)),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def build_model(kind: str, seed: int = 0) -> torch.nn.Module:
    """Weights large enough for distributions that are not flat, and biases and norms that are not trivial."""
    model_class, config = MODELS[kind]
    torch.manual_seed(seed)
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        spread = 0.3 if name.endswith("bias") or "norm" in name else 2.0 / parameter.shape[-1] ** 0.5
        parameter.data = torch.randn_like(parameter) * spread + (1.0 if "norm" in name else 0.0)
    return model


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory) -> dict[str, Path]:
    folders = {}
    for kind in MODELS:
        folder = tmp_path_factory.mktemp(kind)
        build_model(kind).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        folders[kind] = folder
    return folders


@pytest.fixture
def model_dir(model_dirs) -> Path:
    return model_dirs["qwen3"]
