"""Text to token ids and back, without torch: the conductor and the rewards use it too."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polyrhythm.errors import UserError
from polyrhythm.types import ChatMessage


class Rendered(NamedTuple):
    """A prompt as one text. A chat template writes the special tokens itself: adding them again would double the first."""

    text: str
    has_special_tokens: bool


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
        return self.encode_rendered([self.render(prompt)])[0]

    def render(
        self,
        prompt: str | list[ChatMessage],
        tools: list[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Text as it is; messages through the chat template, so that the assistant speaks next.

        If the last message is the assistant's, the model goes on with it.
        """
        if isinstance(prompt, str):
            return Rendered(prompt, has_special_tokens=False)
        return Rendered(self._apply_chat_template(prompt, tools, template_kwargs or {}), has_special_tokens=True)

    def encode_rendered(self, prompts: Sequence[Rendered]) -> list[list[int]]:
        """The token ids of each; of many at a time on all cores."""
        encoded: dict[bool, Iterator[list[int]]] = {}
        for has_special_tokens in (False, True):
            texts = [prompt.text for prompt in prompts if prompt.has_special_tokens is has_special_tokens]
            ids = self._tokenizer(texts, add_special_tokens=not has_special_tokens).input_ids if texts else []
            encoded[has_special_tokens] = iter(ids)
        return [next(encoded[prompt.has_special_tokens]) for prompt in prompts]

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def decode(self, token_ids: Sequence[int], with_special_tokens: bool = False) -> str:
        """The text of the ids, usually without special tokens."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=not with_special_tokens, clean_up_tokenization_spaces=False
        )

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

    def _apply_chat_template(
        self, messages: list[ChatMessage], tools: list[Any] | None, template_kwargs: Mapping[str, Any]
    ) -> str:
        if not self.has_chat_template:
            raise UserError(
                f"model={str(self.model_dir)!r} has no chat template, but a prompt is a list of chat messages: use prompts "
                'of plain text (prompt.form = "text" if they were), or a model that was trained to chat'
            )
        is_continued = messages[-1].get("role") == "assistant"
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=not is_continued,
                continue_final_message=is_continued, **template_kwargs,
            )  # fmt: skip
        # A template is a program of the model's: it raises what it likes, and jinja2 what the values make it do.
        except Exception as error:
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
