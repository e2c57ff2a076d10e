"""The trained model as a folder that transformers, our engine and others load."""

import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel

from polyrhythm.errors import RunError
from polyrhythm.weights.number_format import saved_format

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def save_policy(policy: PreTrainedModel, model_dir: Path, target: Path, save_dtype: str) -> str:
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
        policy.save_pretrained(staging)
        AutoTokenizer.from_pretrained(model_dir).save_pretrained(staging)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(staging, target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise RunError(f"the model could not be saved in {target}: {error}") from error
    return dtype_name


def _cast(policy: PreTrainedModel, dtype: torch.dtype) -> None:
    """Parameters only, in place, so that tied ones stay tied and no second copy is needed; buffers stay as they are."""
    for parameter in policy.parameters():
        if parameter.dtype != dtype:
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)
