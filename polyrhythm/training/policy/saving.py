"""The trained model as a folder that transformers, our engine and others load."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from polyrhythm.errors import RunError
from polyrhythm.weights.number_format import saved_format

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


ONE_FILE, FILE_OF_MANY = "50GB", "2GB"
"""How large a file of a model folder is at most. transformers holds a file in memory while it writes it."""


def save_policy(
    policy: PreTrainedModel, model_dir: Path, target: Path, save_dtype: str, file_size: str = ONE_FILE
) -> str:
    """Policy and tokenizer as a model folder, which appears by one rename; the number format it has.

    The tokenizer is that of `model_dir`, and so is the number format if `save_dtype` is "auto". The policy itself is in
    that format afterwards.
    """
    dtype_name = saved_format(save_dtype, model_dir)
    # Not `.{target.name}`: beside a target `ssh` that is somebody's.
    staging = target.with_name(f".{target.name}.unfinished")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        _cast(policy, DTYPES[dtype_name])
        policy.save_pretrained(staging, max_shard_size=file_size)
        AutoTokenizer.from_pretrained(model_dir).save_pretrained(staging)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(staging, target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise RunError(f"the model could not be saved in {target}: {error}") from error
    return dtype_name


def save_rows(folder: Path, like: PreTrainedModel, model_dir: Path, target: Path, save_dtype: str) -> None:
    """A version that several processes wrote in this number format, as a model folder: one tensor is in memory at a time.

    `like` has its configuration; its weights are not read.
    """
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(like.config, attn_implementation="eager")
    policy.generation_config = like.generation_config
    policy.load_state_dict(dict(_mapped(folder)), strict=False, assign=True)  # what is tied is there once
    policy.tie_weights()
    save_policy(policy, model_dir, target, save_dtype, file_size=FILE_OF_MANY)


def _mapped(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors whose memory is the file."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dictionary
                yield name, file.get_tensor(name)


def _cast(policy: PreTrainedModel, dtype: torch.dtype) -> None:
    """Parameters only, in place, so that tied ones stay tied and no second copy is needed; buffers stay as they are."""
    for parameter in policy.parameters():
        if parameter.dtype != dtype:
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)
