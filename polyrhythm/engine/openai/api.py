"""The OpenAI API of an engine: text in, text out, streamed if asked, by the weights that are loaded."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiohttp import web

from polyrhythm.engine.kinds import NO_VERSION, NewToken, StreamingCore
from polyrhythm.engine.openai.replies import (
    ChatShape,
    CompletionShape,
    Json,
    ReplyFrame,
    ReplyShape,
    error_body,
    event,
    json_response,
    refusal_body,
    usage,
)
from polyrhythm.engine.openai.requests import (
    BadParameter,
    ChatRequest,
    CompletionRequest,
    UnknownModel,
    read_request,
)
from polyrhythm.engine.openai.text import CompletionText, Piece, whole_text
from polyrhythm.engine.refusals import EngineFailed, Refused, TookTooLong
from polyrhythm.errors import UserError
from polyrhythm.http.server import read_body
from polyrhythm.messages import GenerateReply, GenerateRequest
from polyrhythm.tokenizer import Tokenizer
from polyrhythm.types import ChatMessage

_REQUEST_DEADLINE_S = 3600.0
_LAST_WORD_DEADLINE_S = 30.0
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A checked request as the engine will run it: one part per prompt, n completions each."""

    asked: CompletionRequest | ChatRequest
    parts: list[GenerateRequest]
    frame: ReplyFrame
    tokenizer: Tokenizer

    def choice_index(self, part: int, completion: int) -> int:
        return part * self.asked.n + completion

    @property
    def num_choices(self) -> int:
        return len(self.parts) * self.asked.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(part.prompt_ids) for part in self.parts)

    def logprobs(self, piece: Piece) -> Json | None:
        return self.frame.shape.logprobs(piece.tokens, self.tokenizer) if self.asked.wants_logprobs else None


class OpenAiApi:
    """The handlers of the `/v1` routes. The tokenizer of the model folder is loaded when first needed."""

    def __init__(self, engine: StreamingCore, model_dir: Path, model_name: str):
        self._engine = engine
        self._model_dir = model_dir
        self._model_name = model_name
        self._tokenizer: Tokenizer | None = None
        self._started = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/completions", self._completions),
            web.post("/v1/chat/completions", self._chat_completions),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{model:.+}", self._model),
        ]

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = read_request(await read_body(request, "application/json"), CompletionRequest)
        self._check_model(asked.model)
        tokenizer = await self._load_tokenizer()
        prompts = [
            prompt if isinstance(prompt, list) else await self._encode(tokenizer, prompt, "prompt")
            for prompt in asked.prompts()
        ]
        return await self._answer(request, self._job(asked, prompts, asked.max_tokens, CompletionShape(), tokenizer))

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        asked = read_request(await read_body(request, "application/json"), ChatRequest)
        self._check_model(asked.model)
        tokenizer = await self._load_tokenizer()
        prompt = await self._encode(tokenizer, asked.chat_messages(), "messages")
        max_tokens = asked.max_completion_tokens or asked.max_tokens or self._room_after(prompt, asked.n)
        return await self._answer(request, self._job(asked, [prompt], max_tokens, ChatShape(), tokenizer))

    async def _models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._model_entry()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["model"])
        return json_response(self._model_entry())

    def _model_entry(self) -> Json:
        return {"id": self._model_name, "object": "model", "created": self._started, "owned_by": "polyrhythm"}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model_name:
            raise UnknownModel(name, self._model_name)

    async def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = await asyncio.to_thread(Tokenizer, self._model_dir)
            except UserError as error:
                log.error("%s", error)
                raise EngineFailed("the model folder has no usable tokenizer, so this engine takes no text") from error
        return self._tokenizer

    async def _encode(self, tokenizer: Tokenizer, prompt: str | list[ChatMessage], param: str) -> list[int]:
        try:
            return await asyncio.to_thread(tokenizer.encode, prompt)
        except UserError as error:
            # The message names the model by its folder, which is nothing to tell a client.
            raise BadParameter(param, str(error).replace(str(self._model_dir), self._model_name)) from error

    def _room_after(self, prompt: list[int], n: int) -> int:
        """The most tokens that n completions of this prompt can have."""
        in_cache = (self._engine.status().num_kv_tokens - len(prompt)) // n
        return max(1, min(self._engine.context_length - len(prompt), in_cache))

    def _job(
        self,
        asked: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        max_tokens: int,
        shape: ReplyShape,
        tokenizer: Tokenizer,
    ) -> Job:
        version = self._engine.status().policy_version
        if version == NO_VERSION:
            raise EngineFailed("no weights are loaded yet")
        for prompt in prompts:
            self._check_length(prompt, max_tokens)
        reply_id = f"{shape.id_prefix}{uuid.uuid4().hex}"
        sampling = asked.sampling(max_tokens, tokenizer.eos_token_ids)
        parts = [GenerateRequest(reply_id, version, prompt, asked.seeds(), sampling) for prompt in prompts]
        return Job(asked, parts, ReplyFrame(shape, reply_id, int(time.time()), self._model_name, version), tokenizer)

    def _check_length(self, prompt: list[int], max_tokens: int) -> None:
        if not prompt:
            raise BadParameter("prompt", "it has no tokens")
        if len(prompt) + max_tokens > self._engine.context_length:
            raise BadParameter(
                "max_tokens",
                f"{max_tokens} tokens after a prompt of {len(prompt)} exceed the context of "
                f"{self._engine.context_length} tokens",
                "context_length_exceeded",
            )

    async def _answer(self, request: web.Request, job: Job) -> web.StreamResponse:
        if job.asked.stream:
            return await self._stream(request, job)
        async with _one_failure_ends_all() as group:
            tasks = [group.create_task(self._engine.generate(part)) for part in job.parts]
        # Decoding many long texts takes a while, in which others want their answers.
        return await asyncio.to_thread(_whole_reply, job, [task.result() for task in tasks])

    async def _stream(self, request: web.Request, job: Job) -> web.StreamResponse:
        """Write events as tokens come. Nothing is sent before the first token, so a refusal still gets its own status."""
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        arrivals: asyncio.Queue[tuple[int, list[NewToken]]] = asyncio.Queue()
        try:
            async with _one_failure_ends_all() as group:
                for number, part in enumerate(job.parts):
                    on_tokens = partial(_put, arrivals, number)
                    group.create_task(self._engine.generate(part, on_tokens))
                stream = StreamedReply(job)
                while not stream.is_finished:
                    arrived = [await arrivals.get()]
                    while not arrivals.empty():
                        arrived.append(arrivals.get_nowait())
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(b"".join(stream.events(arrived)))
            await _end_stream(request, response, stream.ending())
        except ConnectionError:
            log.debug("the client has gone before the end of its stream")
        except Exception as error:
            if not response.prepared:
                raise
            await _end_stream(request, response, event(_failure_body(error)))
        return response


class StreamedReply:
    """Turns tokens of all choices of a job, as they arrive, into events."""

    def __init__(self, job: Job):
        self._job = job
        self._texts = [CompletionText(job.tokenizer, job.asked.stops) for _ in range(job.num_choices)]
        self._num_unfinished = job.num_choices
        self._num_tokens = 0
        self._opened: set[int] = set()

    @property
    def is_finished(self) -> bool:
        """Whether the last token of every completion has arrived."""
        return self._num_unfinished == 0

    def events(self, arrived: Sequence[tuple[int, list[NewToken]]]) -> list[bytes]:
        events = []
        for part, tokens in arrived:
            for new in tokens:
                events += self._events_of(self._job.choice_index(part, new.completion), new)
        return events

    def ending(self) -> bytes:
        events = b""
        if self._job.asked.include_usage:
            total = usage(self._job.num_prompt_tokens, self._num_tokens)
            events += event(self._job.frame.chunk([]) | {"usage": total})
        return events + event("[DONE]")

    def _events_of(self, index: int, new: NewToken) -> list[bytes]:
        self._num_tokens += 1
        self._num_unfinished -= new.finish_reason is not None
        shape = self._job.frame.shape
        choices = []
        if index not in self._opened:
            self._opened.add(index)
            choices.append(shape.opening(index))
        piece = self._texts[index].add(new)
        if piece.text or piece.finish_reason:
            choices.append(shape.part(index, piece, self._job.logprobs(piece)))
        # Clients that ask for usage find the key in every chunk, with its value in the last.
        extra = {"usage": None} if self._job.asked.include_usage else {}
        return [event(self._job.frame.chunk([choice]) | extra) for choice in choices if choice]


def _whole_reply(job: Job, replies: list[GenerateReply]) -> web.Response:
    choices = []
    num_tokens = 0
    for part, reply in enumerate(replies):
        for number, completion in enumerate(reply.completions):
            num_tokens += len(completion.token_ids)
            piece = whole_text(completion, job.tokenizer, job.asked.stops)
            choices.append(job.frame.shape.whole(job.choice_index(part, number), piece, job.logprobs(piece)))
    return job.frame.whole(choices, usage(job.num_prompt_tokens, num_tokens))


@contextlib.asynccontextmanager
async def _one_failure_ends_all():
    """Tasks that live within a deadline; the first failure cancels the others and is raised as it is."""
    try:
        async with asyncio.timeout(_REQUEST_DEADLINE_S), asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    except TimeoutError:
        raise TookTooLong(f"the request was not done within {_REQUEST_DEADLINE_S:.0f} s") from None


async def _end_stream(request: web.Request, response: web.StreamResponse, last_word: bytes) -> None:
    """Say the last word. A client that does not read it in time loses its connection, which would stay forever.

    By a timer, because aiohttp does not wait twice: after a wait for a client was cancelled, the next one fails at once,
    and the connection is closed only when the client has read what is left.
    """
    if request.transport is None:
        return
    cut_off = asyncio.get_running_loop().call_later(_LAST_WORD_DEADLINE_S, request.transport.abort)
    with contextlib.suppress(ConnectionError):
        await response.write(last_word)
        await response.write_eof()
    cut_off.cancel()


def _failure_body(error: Exception) -> Json:
    if isinstance(error, Refused):
        return refusal_body(error)[1]
    log.error("a stream failed", exc_info=error)
    return error_body(500, "the engine failed on this request; its log has the cause")


def _put(queue: asyncio.Queue[tuple[int, list[NewToken]]], part: int, tokens: list[NewToken]) -> None:
    queue.put_nowait((part, tokens))
