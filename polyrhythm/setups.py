"""What must be the same in all processes of a run, on whatever machine: the package, torch, and the model's shape and tokenizer."""

import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from polyrhythm import __version__
from polyrhythm.messages import Setup

SAYS_NOTHING = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Keys of a config.json that are other ones in another copy of the same model."""
MODEL_FILES = ("config.json", "tokenizer.json")


def setup_of(model_dir: Path) -> Setup:
    """The setup of this process, whose copy of the run's model is in this folder. Weights are not in it: each version has digests."""
    return Setup(
        package=__version__,
        torch=metadata.version("torch").partition("+")[0],
        model={name: _digest(model_dir / name) for name in MODEL_FILES},
    )


def differences(theirs: Setup, ours: Setup, with_torch: bool) -> str:
    """In words, what does not fit; empty if everything does. Only those who add up gradients need the same torch."""
    found = []
    if theirs.package != ours.package:
        found.append(f"it has polyrhythm {theirs.package}, the run has {ours.package}")
    if with_torch and theirs.torch != ours.torch:
        found.append(f"it has torch {theirs.torch}, the run has {ours.torch}")
    files = [name for name in MODEL_FILES if theirs.model.get(name) != ours.model.get(name)]
    if files:
        found.append(f"its model is another one than the run's, by {' and '.join(files)}")
    return "; ".join(found)


def _digest(path: Path) -> str:
    """Of what the file says, however it is laid out."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return "none"
    return hashlib.sha256(json.dumps(_what_counts(content), sort_keys=True).encode()).hexdigest()


def _what_counts(content: Any) -> Any:
    if not isinstance(content, dict):
        return content
    if "added_tokens" in content:  # a tokenizer: how long it may pad or cut is nobody's business here
        return {key: content.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    return {key: value for key, value in content.items() if key not in SAYS_NOTHING}
