"""In which numbers the weights of a model folder are written. Without torch: the headers of the files say it."""

import json
from collections import Counter
from pathlib import Path

NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""As safetensors and torch call them."""


def number_format(model_dir: Path) -> str:
    """That of most weights; float32 for whatever is not known here."""
    sizes: Counter[str] = Counter()
    for path in sorted(model_dir.glob("*.safetensors")):
        sizes.update(_bytes_by_format(path))
    known = [name for name, _ in sizes.most_common() if name in NAMES]
    return NAMES[known[0]] if known else "float32"


def saved_format(save_dtype: str, model_dir: Path) -> str:
    """What `training.save_dtype` means for a run that began with the model in this folder."""
    return number_format(model_dir) if save_dtype == "auto" else save_dtype


def _bytes_by_format(path: Path) -> Counter[str]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    sizes: Counter[str] = Counter()
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            sizes[entry["dtype"]] += end - begin
    return sizes
