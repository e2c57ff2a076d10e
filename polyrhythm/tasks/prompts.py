"""From what a task calls its prompt to what the model is asked: `[prompt]` for problems of every task. Pure."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from polyrhythm.config import PromptConfig
from polyrhythm.errors import UserError
from polyrhythm.types import ChatMessage, Problem

PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")
"""A name in braces; doubled braces stand for braces, and others, as in \\boxed{}, are nothing special."""
QUESTION_NAMES = ("question", "prompt")
"""What a template may call the prompt itself."""


def check_prompt(prompt: Any, place: str) -> str | list[ChatMessage]:
    """The prompt as text or as messages with plain text in them; UserError, beginning with `place`, for anything else."""
    if isinstance(prompt, str):
        if not prompt:
            raise UserError(f"{place}: the prompt is empty")
        return prompt
    if hasattr(prompt, "tolist"):
        kind = type(prompt).__name__
        raise UserError(
            f"{place}: the prompt is a {kind} of numpy or pandas: make it a list of messages with .tolist()"
        )
    if not isinstance(prompt, list):
        raise UserError(f"{place}: the prompt is neither text nor a list of messages, but {_kind_of(prompt)}")
    if not prompt:
        raise UserError(f"{place}: the prompt is empty")
    return [_check_message(message, number, place) for number, message in enumerate(prompt, start=1)]


def form_prompt(problem: Problem, config: PromptConfig) -> Problem:
    """The problem as `[prompt]` wants it: its question in the template, as text or as a chat, with the system message."""
    prompt = problem.prompt
    if isinstance(prompt, str) and _becomes_chat(config):
        prompt = [{"role": "user", "content": prompt}]
    if config.template:
        prompt = _fill_in_prompt(config.template, prompt, problem)
    if config.system and not isinstance(prompt, str) and prompt[0]["role"] != "system":
        prompt = [{"role": "system", "content": config.system}, *prompt]
    return problem if prompt is problem.prompt else msgspec.structs.replace(problem, prompt=prompt)


def fill_template(template: str, values: Mapping[str, Any]) -> str:
    """The template with every `{name}` replaced by its value; UserError names one that there is not."""

    def fill(found: re.Match[str]) -> str:
        name = found[1]
        if name is None:
            return found[0][0]
        if name not in values:
            raise UserError(
                f"prompt.template has {{{name}}}, and there is only {', '.join(f'{{{known}}}' for known in values)}: "
                f"use one of them, or write {{{{{name}}}}} if the braces are meant"
            )
        return str(values[name])

    return PLACEHOLDER.sub(fill, template)


def _becomes_chat(config: PromptConfig) -> bool:
    return config.form == "chat" or (config.form == "auto" and bool(config.system or config.template))


def _fill_in_prompt(template: str, prompt: str | list[ChatMessage], problem: Problem) -> str | list[ChatMessage]:
    """Around the text, or around what the user says last in a chat."""
    if isinstance(prompt, str):
        return fill_template(template, _values(prompt, problem))
    last = max((place for place, message in enumerate(prompt) if message["role"] == "user"), default=None)
    if last is None:
        return prompt
    filled = fill_template(template, _values(prompt[last].get("content", ""), problem))
    return [*prompt[:last], prompt[last] | {"content": filled}, *prompt[last + 1 :]]


def _values(question: str, problem: Problem) -> dict[str, Any]:
    """All columns but the answer, which a model must not be told by accident."""
    columns = {name: value for name, value in problem.columns.items() if name != "answer"}
    return columns | dict.fromkeys(QUESTION_NAMES, question)


def _check_message(message: Any, number: int, place: str) -> ChatMessage:
    where = f"{place}: message {number} of the prompt"
    if not isinstance(message, dict):
        raise UserError(f"{where} is no object with role and content, but {_kind_of(message)}")
    # Tables give every message all the keys that any of them has.
    message = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = content = "".join(_check_part(part, where) for part in content)
    if content is None and message.get("tool_calls"):
        message["content"] = content = ""
    if not isinstance(message.get("role"), str) or content is None:
        raise UserError(f"{where} needs role and content, it has {', '.join(message) or 'nothing'}")
    if not isinstance(content, str):
        raise UserError(f"{where} has a content that is neither text nor a list of parts, but {_kind_of(content)}")
    return message


def _check_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else _kind_of(part)
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text":
        raise UserError(f"{where} holds a part of type {kind!r}: models here read text only")
    if not isinstance(text, str):
        raise UserError(f"{where} holds a part without text")
    return text


def _kind_of(value: Any) -> str:
    return "null" if value is None else type(value).__name__
