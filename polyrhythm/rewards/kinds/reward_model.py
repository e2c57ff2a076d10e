"""Reward model: what a sequence classifier of transformers says about prompt and completion."""

import json
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from polyrhythm.errors import UserError
from polyrhythm.rewards.kinds.completions import Completion, text_of

KEY = "reward.options.reward_model.path"
KIND = "ForSequenceClassification"
LIBRARIES_MB = 1500
"""Address space of Python, torch and transformers with a batch of eight completions (measured: 740 MB and 400 MB)."""


@dataclass(config=ConfigDict(extra="forbid", strict=True), kw_only=True)
class RewardModel:
    """The number that the model in a folder gives to prompt and completion, on one core of each reward worker.

    Text is scored as it stands; messages go through the chat template of the reward model. What is longer than the model's
    context loses its beginning.
    """

    path: str = Field(min_length=1)
    """A folder with a transformers model of the kind …ForSequenceClassification with one label, and its tokenizer."""
    batch: int = Field(8, ge=1)
    """How many completions go through the model at once; 1 if its tokenizer has no padding token."""
    groups_per_call: int = Field(1, ge=1)
    """How many groups wait for each other, so that small ones fill a batch."""

    def __post_init__(self) -> None:
        folder = Path(self.path).expanduser()
        _check_folder(folder)
        _check_memory(folder)
        self._tokenizer, self._model = _load(folder)
        if self._tokenizer.pad_token_id is None:
            self.batch = 1
        else:
            self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._max_tokens = getattr(self._model.config, "max_position_embeddings", None)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Completion], **_: Any) -> list[float]:
        token_ids = [self._encode(*pair) for pair in zip(prompts, completions, strict=True)]
        starts = range(0, len(token_ids), self.batch)
        return [score for start in starts for score in self._score(token_ids[start : start + self.batch])]

    def _encode(self, prompt: Any, completion: Completion) -> list[int]:
        if isinstance(prompt, str):
            text = prompt + text_of(completion)
        elif not self._tokenizer.chat_template:
            raise ValueError(f"{KEY}={self.path!r} has no chat template, but the prompt is a list of messages")
        else:
            text = self._tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
        # A template writes the special tokens itself, and TRL leaves them out of plain text as well.
        token_ids = self._tokenizer(text, add_special_tokens=False).input_ids
        if self._max_tokens:
            token_ids = token_ids[-self._max_tokens :]
        return token_ids or [self._tokenizer.eos_token_id or 0]

    def _score(self, batch: list[list[int]]) -> list[float]:
        import torch

        longest = max(map(len, batch))
        pad = self._tokenizer.pad_token_id or 0
        token_ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in batch])
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in batch])
        with torch.inference_mode():
            return self._model(input_ids=token_ids, attention_mask=mask).logits[:, 0].float().tolist()


def _check_folder(folder: Path) -> None:
    """A causal model would load too, with a head of random numbers."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kinds = ", ".join(config.get("architectures") or ["no architecture"])
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{KEY}={str(folder)!r} is no folder with a transformers model: {error}") from error
    if not kinds.endswith(KIND):
        raise UserError(f"{KEY}={str(folder)!r} holds {kinds}: a reward model is of the kind …{KIND}")


def _check_memory(folder: Path) -> None:
    """The weights are in the address space twice while they are loaded: as a file and as tensors."""
    weights_mb = sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 2**20
    needed_mb = LIBRARIES_MB + 2 * weights_mb
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < needed_mb * 2**20:
        raise UserError(
            f"reward.memory_mb={limit // 2**20} is too little for {KEY}={str(folder)!r} with {weights_mb} MB of weights: "
            f"give at least {needed_mb}, or 0 for no limit"
        )


def _load(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype="auto", output_loading_info=True
        )
    # transformers raises ValueError, OSError, KeyError, … for a folder that it cannot use.
    except Exception as error:
        raise UserError(f"{KEY}={str(folder)!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if loaded["missing_keys"]:
        raise UserError(f"{KEY}={str(folder)!r} has no weights for {', '.join(sorted(loaded['missing_keys'])[:3])}")
    if model.config.num_labels != 1:
        raise UserError(f"{KEY}={str(folder)!r} has {model.config.num_labels} labels: a reward model gives one number")
    return tokenizer, model.eval()
