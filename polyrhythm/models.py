"""Which models can be trained, found out from the files in a model's folder before anything is loaded or started.

Nothing here imports torch or transformers: their configuration classes take seconds to import. The engine and the trainer
ask the same questions of a model that they have loaded (`why_not_generated`, `why_not_trained`).
"""

import json
from pathlib import Path
from typing import Any

from polyrhythm.errors import UserError

EMBEDDED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""One architecture, with or without biases and query/key norms."""
INSTEAD = "use a Llama, Qwen2 or Qwen3 model, such as smollm2-135m or Qwen/Qwen3-0.6B"
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
    """Why the embedded engine cannot run a model, as a clause about it; None if it can."""
    model_type, activation = config.get("model_type"), config.get("hidden_act", "silu")
    if model_type not in EMBEDDED_MODEL_TYPES:
        *others, last = EMBEDDED_MODEL_TYPES
        return f"is of type {model_type}, and the embedded engine runs {', '.join(others)} and {last}"
    if _has_sliding_windows(config):
        return "has sliding windows, which the embedded engine does not run"
    if activation != "silu":
        return f"has the activation {activation}, and the embedded engine runs silu"
    return _why_not_its_rotations(config)


def why_not_trained(config: ModelConfig) -> str | None:
    """Why the trainer cannot pack sequences of a model into rows, as a clause about it; None if it can."""
    if softcap := config.get("final_logit_softcapping"):
        return f"soft-caps its logits (final_logit_softcapping={softcap}), which the trainer does not do"
    return _why_not_its_rotations(config)


def _why_not_a_causal_model(config: ModelConfig) -> str | None:
    architecture = next(iter(config.get("architectures") or []), "")
    if config.get("is_encoder_decoder") or (architecture and not architecture.endswith(("ForCausalLM", "LMHeadModel"))):
        return f"is a {architecture or config.get('model_type')}, not a causal language model"
    return None


def _why_not_loaded(config: ModelConfig) -> str | None:
    # Code of transformers is preferred to that of a model; what it does not know is not imported either.
    if config.get("auto_map") and config.get("model_type") not in EMBEDDED_MODEL_TYPES:
        return f"brings code of its own (auto_map, type {config.get('model_type')}), which is never run"
    return None


def _has_sliding_windows(config: ModelConfig) -> bool:
    if layer_types := config.get("layer_types"):
        return any(kind != "full_attention" for kind in layer_types)
    if config.get("model_type") not in ("qwen2", "qwen3") or not config.get("use_sliding_window"):
        return False
    # As transformers decides for a file without layer_types, with its defaults.
    first_with_window = config.get("max_window_layers", 28)
    return config.get("sliding_window", 4096) is not None and first_with_window < config.get("num_hidden_layers", 32)


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
