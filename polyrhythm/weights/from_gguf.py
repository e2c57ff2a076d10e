"""A GGUF file to a transformers model folder: `python -m polyrhythm.weights.from_gguf model.gguf folder`."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(gguf: Path, folder: Path) -> None:
    """Weights in fp32, generation config, tokenizer and chat template."""
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    config: Any = model.config
    # A model loaded from GGUF counts as quantized and refuses to be saved: build it anew from its plain config.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(str(folder))
    # GGUF states no limit for the tokenizer, and transformers would save 1e30.
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(str(folder))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
