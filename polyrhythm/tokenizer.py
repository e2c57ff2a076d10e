"""Text to token ids and back, without torch: the conductor and the rewards use it too."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyrhythm.errors import UserError
from polyrhythm.types import ChatMessage


class Tokenizer:
    """The fast tokenizer of a model folder, and the few numbers of the model that go with it."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = Path(model_dir)
        self._model_config = self._read_json("config.json")
        self._tokenizer = self._load_fast_tokenizer()
        self.vocab_size = int(self._model_number("vocab_size"))
        self.context_length = int(self._model_number("max_position_embeddings", "n_positions"))
        self.eos_token_ids = self._find_eos_token_ids()

    def encode(self, prompt: str | list[ChatMessage]) -> list[int]:
        """Text as it is with the usual special tokens; messages through the chat template, up to the answer."""
        if isinstance(prompt, str):
            return self._tokenizer(prompt).input_ids
        # The template writes the special tokens itself: adding them again would double the first one.
        return self._tokenizer(self._apply_chat_template(prompt), add_special_tokens=False).input_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def piece(self, token_id: int) -> str:
        """The text of one token by itself, special ones included."""
        return self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)

    def _load_fast_tokenizer(self) -> Any:
        if not (self.model_dir / "tokenizer.json").is_file():
            raise UserError(
                f"model={str(self.model_dir)!r} has no tokenizer.json: save its fast tokenizer into that folder "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(folder))"
            )
        # Not AutoTokenizer: that one imports torch.
        from transformers import PreTrainedTokenizerFast

        try:
            return PreTrainedTokenizerFast.from_pretrained(str(self.model_dir), local_files_only=True)
        # The tokenizers library raises bare Exception for a file that it cannot parse.
        except Exception as error:
            raise UserError(f"model={str(self.model_dir)!r}: its tokenizer cannot be loaded: {error}") from error

    def _apply_chat_template(self, messages: list[ChatMessage]) -> str:
        if not self._tokenizer.chat_template:
            raise UserError(
                f"model={str(self.model_dir)!r} has no chat template, but a prompt is a list of chat messages: "
                "use prompts of plain text, or a model that was trained to chat"
            )
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise UserError(f"model={str(self.model_dir)!r}: its chat template refuses the prompt: {error}") from error

    def _find_eos_token_ids(self) -> tuple[int, ...]:
        found: list[int] = []
        generation_config = self._read_json("generation_config.json", required=False)
        for value in (
            generation_config.get("eos_token_id"),
            self._model_config.get("eos_token_id"),
            self._tokenizer.eos_token_id,
        ):
            found.extend(value if isinstance(value, list) else [] if value is None else [value])
        return tuple(dict.fromkeys(found))

    def _model_number(self, *keys: str) -> int:
        """By its usual name, or by another that some models have for it."""
        # Models of several modalities keep the language model's numbers in a table of their own.
        for table in (self._model_config, self._model_config.get("text_config", {})):
            for key in keys:
                if isinstance(table.get(key), int):
                    return table[key]
        raise UserError(f"model={str(self.model_dir)!r}: config.json has no {keys[0]}: is it a causal language model?")

    def _read_json(self, name: str, required: bool = True) -> dict[str, Any]:
        path = self.model_dir / name
        if not path.is_file():
            if required:
                raise UserError(f"model={str(self.model_dir)!r} has no {name}: give a folder with a transformers model")
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"model={str(self.model_dir)!r}: {name} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise UserError(f"model={str(self.model_dir)!r}: {name} is not a JSON object")
        return content
