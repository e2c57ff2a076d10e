"""Which models can be trained, found out from the files in a model's folder before anything is loaded or started.

Nothing here imports torch or transformers: their configuration classes take seconds to import. The engine and the trainer
ask the same questions of a model that they have loaded (`why_not_generated`, `why_not_trained`).
"""

import json
from pathlib import Path
from typing import Any

from polyrhythm.errors import UserError

TESTED = (
    "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_neox",
    "gpt_oss", "granite", "helium", "hunyuan_v1_dense", "llama", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe",
    "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
"""Each has a tiny model in the tests. Others are tried: a probe at the start compares them with transformers."""
STATE = "carries a state from token to token, which cannot be shared or packed"
OWN_ATTENTION = "computes attention by itself instead of calling the function it is given"
REFUSED = {
    **dict.fromkeys(
        ("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba",
         "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma",
         "rwkv", "xlstm", "zamba", "zamba2"),
        STATE,
    ),
    **dict.fromkeys(("bloom", "codegen", "gptj", "llama4_text", "mpt", "nemotron", "stablelm"), OWN_ATTENTION),
}  # fmt: skip
"""Why these cannot be run."""
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
INSTEAD = "use a decoder such as Llama, Mistral, Qwen3, Gemma or Phi; `polyrhythm models` lists them"
WEIGHTS_FILE, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"
# Their frequencies are chosen by the longest sequence of a batch: each sequence would depend on its neighbours.
ROPES_OF_THE_WHOLE_BATCH = ("dynamic", "longrope")

ModelConfig = dict[str, Any]
"""The content of a config.json."""


def check_model_folder(folder: Path, name: str) -> Path:
    """The folder, if the model in it can be trained; otherwise a UserError that names the model, the cause and a way out."""
    check_model_config(folder, name)
    _check_weights(folder, name)
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"model={name!r} has no tokenizer.json: save its fast tokenizer into the folder too")
    return folder


def check_model_config(folder: Path, name: str) -> None:
    """What config.json alone tells: the weights need not be there yet."""
    config = _read_config(folder, name)
    checks = (_why_not_a_causal_model, _why_not_loaded, why_not_generated, why_not_trained)
    if why := next(filter(None, (check(config) for check in checks)), None):
        raise UserError(f"model={name!r} {why}: {INSTEAD}")
    if quantisation := config.get("quantization_config"):
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise UserError(
            f"model={name!r} is quantised ({method}), and training needs weights in fp32, bf16 or fp16: "
            "use the model that it was made from"
        )


def why_not_generated(config: ModelConfig) -> str | None:
    """Why the embedded engine cannot run a model, as a clause about it; None if it can, or has to be tried."""
    if why := REFUSED.get(str(config.get("model_type"))):
        return why
    kinds = config.get("layer_types") or config.get("layers_block_type") or []
    if odd := sorted({str(kind) for kind in kinds} - ATTENTION_LAYERS):
        return f"has layers of type {', '.join(odd)}, of which nothing is known here"
    return _why_not_its_rotations(config)


def why_not_trained(config: ModelConfig) -> str | None:
    """Why the trainer cannot pack sequences of a model into rows, as a clause about it; None if it can."""
    return _why_not_its_rotations(config)


def _why_not_a_causal_model(config: ModelConfig) -> str | None:
    architecture = next(iter(config.get("architectures") or []), "")
    if config.get("is_encoder_decoder") or (architecture and not architecture.endswith(("ForCausalLM", "LMHeadModel"))):
        return f"is a {architecture or config.get('model_type')}, not a causal language model"
    return None


def _why_not_loaded(config: ModelConfig) -> str | None:
    # Code of transformers is preferred to that of a model; what it does not know is not imported either.
    if config.get("auto_map") and config.get("model_type") not in TESTED:
        return f"brings code of its own (auto_map, type {config.get('model_type')}), which is never run"
    return None


def _why_not_its_rotations(config: ModelConfig) -> str | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type")
    if rope_type in ROPES_OF_THE_WHOLE_BATCH:
        return f"chooses its rotary frequencies by the longest sequence of a batch (rope_type={rope_type!r})"
    return None


def _read_config(folder: Path, name: str) -> ModelConfig:
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise UserError(f"model={name!r} is a LoRA adapter: merge it into its base model and save that")
        raise UserError(f"model={name!r} has no config.json: give a folder with a transformers model")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"model={name!r}: config.json is not JSON: {error}") from None
    if not isinstance(config, dict) or not config.get("model_type"):
        raise UserError(f"model={name!r}: config.json has no model_type: give a folder with a transformers model")
    return config


def _check_weights(folder: Path, name: str) -> None:
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"model={name!r}: {WEIGHTS_INDEX} cannot be read: {error!r}") from None
    elif (folder / WEIGHTS_FILE).is_file():
        shards = [WEIGHTS_FILE]
    else:
        others = sorted(path.name for kind in ("*.bin", "*.gguf", "*.safetensors") for path in folder.glob(kind))
        instead = f", only {', '.join(others[:3])}" if others else ""
        raise UserError(f"model={name!r} has no {WEIGHTS_FILE}{instead}: save the model with save_pretrained")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise UserError(f"model={name!r} lacks {missing[0]}, one of {len(missing)} weight files that are not there: "
                        "get the whole folder")  # fmt: skip
    for shard in shards:
        with (folder / shard).open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise UserError(f"model={name!r}: {shard} is a Git LFS pointer without the weights: run git lfs pull")
