"""A model small enough for whole runs in seconds: a two-layer Llama with a byte tokenizer."""

from pathlib import Path
from typing import Any

import torch

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index + 1 for index, character in enumerate(alphabet)} | {"<eos>": 0}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def save_tiny_model(folder: Path, chat_template: str | None = None) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
        eos_token_id=0, bos_token_id=None, pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_tiny_reward_model(folder: Path) -> Path:
    """A sequence classifier with one label and a chat template; its numbers are random, but always the same."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, num_labels=1, pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder
