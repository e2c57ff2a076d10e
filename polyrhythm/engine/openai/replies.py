"""What the OpenAI routes answer: whole replies, chunks of a stream, errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from aiohttp import web

from polyrhythm.engine.openai.text import Piece, TokenText
from polyrhythm.engine.refusals import Refused, TooLarge
from polyrhythm.http.errors import Refusal
from polyrhythm.http.server import plain_error
from polyrhythm.tokenizer import Tokenizer

Json = dict[str, Any]
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 409: "conflict_error"}


class ReplyShape(Protocol):
    """How a route writes its answer down."""

    id_prefix: str
    kind: str
    chunk_kind: str

    def whole(self, index: int, piece: Piece, logprobs: Json | None) -> Json: ...

    def opening(self, index: int) -> Json | None: ...

    def part(self, index: int, piece: Piece, logprobs: Json | None) -> Json: ...

    def logprobs(self, tokens: Sequence[TokenText], tokenizer: Tokenizer) -> Json: ...


class CompletionShape:
    """The answers of `/v1/completions`."""

    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def whole(self, index: int, piece: Piece, logprobs: Json | None) -> Json:
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def opening(self, index: int) -> Json | None:
        return None

    def part(self, index: int, piece: Piece, logprobs: Json | None) -> Json:
        return self.whole(index, piece, logprobs)

    def logprobs(self, tokens: Sequence[TokenText], tokenizer: Tokenizer) -> Json:
        return {
            "tokens": [tokenizer.piece(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": None,
            "text_offset": [token.offset for token in tokens],
        }


class ChatShape:
    """The answers of `/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def whole(self, index: int, piece: Piece, logprobs: Json | None) -> Json:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, piece: Piece, logprobs: Json | None) -> Json:
        delta = {"content": piece.text} if piece.text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def logprobs(self, tokens: Sequence[TokenText], tokenizer: Tokenizer) -> Json:
        content = []
        for token in tokens:
            text = tokenizer.piece(token.token_id)
            # A token may be half a character; then its text is not its bytes.
            as_bytes = None if "\ufffd" in text else list(text.encode())
            content.append({"token": text, "logprob": token.logprob, "bytes": as_bytes, "top_logprobs": []})
        return {"content": content, "refusal": None}


@dataclass(frozen=True)
class ReplyFrame:
    """What all parts of the answer to one request have in common."""

    shape: ReplyShape
    reply_id: str
    created: int
    model: str
    policy_version: int

    def whole(self, choices: list[Json], usage: Json) -> web.Response:
        body = self._body(self.shape.kind, choices) | {"usage": usage}
        return json_response(body)

    def chunk(self, choices: list[Json]) -> Json:
        return self._body(self.shape.chunk_kind, choices)

    def _body(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.reply_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"policy-{self.policy_version}",
            "choices": choices,
        }


def usage(num_prompt_tokens: int, num_completion_tokens: int) -> Json:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def event(body: Json | str) -> bytes:
    """A server-sent event."""
    data = body.encode() if isinstance(body, str) else msgspec.json.encode(body)
    return b"data: " + data + b"\n\n"


def json_response(body: Json, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> Json:
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal_body(refusal: Refused) -> tuple[int, Json]:
    """Status and body of a refusal. What can never fit is a bad request to clients of this API."""
    status = 400 if isinstance(refusal, TooLarge) else refusal.status
    return status, error_body(status, str(refusal), refusal.param, refusal.code)


def say_error(request: web.Request, status: int, said: str, refusal: Refusal | None) -> web.Response:
    """Errors under `/v1` have the shape of that API; all others are one line of text."""
    if not request.path.startswith("/v1/"):
        return plain_error(request, status, said, refusal)
    if isinstance(refusal, Refused):
        status, body = refusal_body(refusal)
        return json_response(body, status)
    return json_response(error_body(status, said), status)
