"""What the OpenAI routes accept. Every parameter is used, harmless and ignored, or refused by its name."""

import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from polyrhythm.engine.embedded.scheduler import MAX_ID, SMALLEST_TOP_P
from polyrhythm.engine.refusals import Refused
from polyrhythm.types import ChatMessage, Sampling, rollout_seed

MAX_COMPLETIONS = 2048
# They say who asks and how to bill or store it, nothing about the answer.
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
# What is not built here is accepted where it asks for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "top_logprobs": (0,),
}
_REASONS = {
    "echo": "the prompt is not given back",
    "top_logprobs": "only the log-probability of each drawn token is known; use 0",
    "tools": "tools are not supported",
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Logits divided by less than this leave the range of numbers; the most likely token wins long before.
_GREEDY_BELOW = 1e-4
R = TypeVar("R", bound="SamplingParameters")


class BadParameter(Refused):
    """A parameter has a value that cannot be used."""

    def __init__(self, param: str, message: str, code: str | None = None):
        super().__init__(f"{param}: {message}")
        self.param = param
        self.code = code


class UnknownModel(BadParameter):
    """The request names a model that is not served here."""

    status = 404

    def __init__(self, name: str, served: str):
        super().__init__("model", f"{name!r} is not served here; this engine serves {served!r}", "model_not_found")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """What both routes know; `top_k` is an extension."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MAX_ID)] = 0
    stop: str | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=16)] = []
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        if isinstance(self.stop, str):
            return (self.stop,) if self.stop else ()
        return tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int, stop_token_ids: tuple[int, ...]) -> Sampling:
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature if self.temperature >= _GREEDY_BELOW else 0.0,
            top_p=max(self.top_p, SMALLEST_TOP_P),
            top_k=max(self.top_k, 0),
            stop=self.stops,
            stop_token_ids=stop_token_ids,
        )

    def seeds(self) -> list[int]:
        """A seed for each of the n completions of a prompt: from the one given, else random."""
        if self.seed is None:
            return [secrets.randbits(63) for _ in range(self.n)]
        return [rollout_seed(self.seed, 0, 0, index) for index in range(self.n)]


class CompletionRequest(SamplingParameters, frozen=True, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    logprobs: Annotated[int, Meta(ge=0)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt, as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(part) for part in self.prompt}
        if kinds == {int}:
            return [[part for part in self.prompt if isinstance(part, int)]]
        if kinds not in ({str}, {list}):
            raise BadParameter("prompt", "a text, a list of texts, token ids, or a list of lists of token ids")
        if len(self.prompt) * self.n > MAX_COMPLETIONS:
            raise BadParameter("prompt", f"{len(self.prompt)} prompts with n={self.n} exceed {MAX_COMPLETIONS}")
        return [part for part in self.prompt if not isinstance(part, int)]

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[TextPart]


class ChatRequest(SamplingParameters, frozen=True, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool = False

    def chat_messages(self) -> list[ChatMessage]:
        """Role and plain text of every message."""
        messages = []
        for message in self.messages:
            if message.role not in _ROLES:
                raise BadParameter("messages", f"role {message.role!r} is none of {', '.join(_ROLES)}")
            parts = [TextPart("text", message.content)] if isinstance(message.content, str) else message.content
            if other := {part.type for part in parts} - {"text"}:
                raise BadParameter("messages", f"content of type {min(other)!r}: only text is understood")
            messages.append({"role": _ROLES[message.role], "content": "".join(part.text for part in parts)})
        return messages

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs


def read_request(body: bytes, kind: type[R]) -> R:
    """The checked request; `BadParameter` names the parameter that is wrong."""
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise Refused("the body must be a JSON object")
    known = set(kind.__struct_fields__)
    parameters = {}
    for name, value in given.items():
        if value is None or name in _IGNORED:
            continue
        if name in known:
            parameters[name] = value
        elif value not in _NEUTRAL.get(name, ()):
            raise BadParameter(name, _REASONS.get(name, "this parameter is not supported"))
    try:
        request = msgspec.convert(parameters, kind)
    except msgspec.ValidationError as error:
        raise _bad_parameter(error) from error
    if isinstance(request, CompletionRequest) and request.logprobs:
        raise BadParameter(
            "logprobs", f"{request.logprobs} likely tokens were asked for; use 0 for the drawn one alone"
        )
    if request.stream_options is not None and not request.stream:
        raise BadParameter("stream_options", "only with stream=true")
    return request


def _bad_parameter(error: msgspec.ValidationError) -> BadParameter:
    """From what msgspec says: "Expected `int`, got `str` - at `$.n`", "Object missing required field `prompt`"."""
    text = str(error)
    found = re.search(r"\$\.(\w+)", text) or re.search(r"field `(\w+)`", text)
    message = text.split(" - at ")[0].replace("`", "")
    return BadParameter(found.group(1) if found else "body", message[0].lower() + message[1:])
