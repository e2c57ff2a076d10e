"""The trained model as a folder that transformers, our engine and others load."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from polyrhythm.errors import RunError
from polyrhythm.weights.export import Rows, whole
from polyrhythm.weights.number_format import saved_format
from polyrhythm.weights.store import WeightStore, space_for

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


def save_snapshot(
    store: WeightStore, version: int, like: PreTrainedModel, model_dir: Path, target: Path, save_dtype: str
) -> None:
    """A published version as a model folder, for a policy that nobody holds whole: one tensor is in memory at a time.

    `like` has its configuration; its weights are not read.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    dtype = DTYPES[saved_format(save_dtype, model_dir)]
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as place:
        rounded = _rounded(store, version, WeightStore(Path(place)), dtype)
        with torch.device("meta"):
            policy = AutoModelForCausalLM.from_config(like.config, attn_implementation="eager")
        policy.generation_config = like.generation_config
        policy.load_state_dict(dict(_mapped(rounded)), strict=False, assign=True)  # what is tied is there once
        policy.tie_weights()
        save_policy(policy, model_dir, target, save_dtype, file_size=FILE_OF_MANY)


def _rounded(store: WeightStore, version: int, target: WeightStore, dtype: torch.dtype) -> Path:
    """The folder of the same version in another store, in another number format. Digests are checked on the way."""
    entries = store.manifest(version).tensors
    formats = {name: dtype if entry.is_floating_point else space_for(entry, 0).dtype for name, entry in entries.items()}
    target.begin(
        [Rows(name, tuple(entry.shape), 0, torch.empty((0, *entry.shape[1:]), dtype=formats[name])) for name, entry in entries.items()],
        version,
    )  # fmt: skip
    written = []
    for name, entry in entries.items():
        store.load_part_into({name: (tensor := space_for(entry))}, version)
        written.append(target.write_rows([whole(name, tensor.to(formats[name]))], version))
    return target.finish(version, written)


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
