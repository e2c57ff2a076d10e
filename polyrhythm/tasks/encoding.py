"""From prompts to token ids: the same for the check before a run, for `polyrhythm data` and for the conductor."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from polyrhythm.config import Config
from polyrhythm.errors import UserError
from polyrhythm.tokenizer import Rendered, Tokenizer
from polyrhythm.types import Problem

NUM_TOGETHER = 1000


class PromptText:
    """Text for rollouts: problems to prompt ids, with the run's `[prompt]` options, and token ids to text."""

    def __init__(self, tokenizer: Tokenizer, config: Config) -> None:
        if config.engine.context_length > tokenizer.context_length:
            raise UserError(f"engine.context_length={config.engine.context_length} is more than the "
                            f"{tokenizer.context_length} tokens of model={config.model!r}: lower it")  # fmt: skip
        self._tokenizer = tokenizer
        self._template_kwargs = config.prompt.chat_template_kwargs
        self._is_cut = config.prompt.too_long == "truncate"
        self.context_length = config.engine.context_length or tokenizer.context_length
        is_raisable = self.context_length < tokenizer.context_length
        self.or_longer = ", raise engine.context_length" if is_raisable else ""
        self.max_prompt_tokens = self.context_length - config.rollout.max_tokens
        if self.max_prompt_tokens < 1:
            raise UserError(
                f"rollout.max_tokens={config.rollout.max_tokens} leaves no room for a prompt in the context of "
                f"{self.context_length} tokens: lower it"
            )

    def encode(self, problem: Problem) -> list[int]:
        """The prompt that the engine is given; one that is too long loses its beginning, if that was asked for."""
        (ids,) = self._tokenizer.encode_rendered([self._render(problem)])
        return ids[-self.max_prompt_tokens :] if self._is_cut else ids

    def lengths(self, problems: Iterable[Problem]) -> Iterator[tuple[int, int]]:
        """The index of each problem and the number of tokens of its prompt, uncut; many are encoded together."""
        remaining = iter(problems)
        while some := list(islice(remaining, NUM_TOGETHER)):
            encoded = self._tokenizer.encode_rendered([self._render(problem) for problem in some])
            yield from ((problem.index, len(ids)) for problem, ids in zip(some, encoded, strict=True))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def show(self, token_ids: Sequence[int]) -> str:
        """Every token, special ones included."""
        return self._tokenizer.decode(token_ids, with_special_tokens=True)

    def _render(self, problem: Problem) -> Rendered:
        tools = None if isinstance(problem.prompt, str) else _tools_of(problem)
        return self._tokenizer.render(problem.prompt, tools, self._template_kwargs)


def _tools_of(problem: Problem) -> list[Any] | None:
    """The column `tools`, which chat templates describe to the model: a list of schemas, or the JSON of one."""
    tools = problem.columns.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise UserError(f"problem {problem.index}: the column 'tools' is text, but not JSON: {error}") from error
    if not (tools is None or isinstance(tools, list)):
        raise UserError(
            f"problem {problem.index}: the column 'tools' is {type(tools).__name__}: give a list of schemas"
        )
    return tools
