"""Who runs when: requests in arrival order, joining and leaving between decoding steps. Bookkeeping, no tensors."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from polyrhythm.engine.embedded.kv_cache import KvRange, SlotAllocator, slots_needed
from polyrhythm.engine.kinds import NewToken
from polyrhythm.engine.refusals import Refused, TooLarge
from polyrhythm.messages import GenerateReply, GenerateRequest
from polyrhythm.types import Completion, FinishReason

# Chunks start at multiples of this in every prompt, so that how a prompt is cut depends on the prompt alone.
PREFILL_CHUNK = 256
# Matrix products gain little beyond this many rows; a pass with more would only keep others waiting.
ROWS_PER_PASS = 64
MAX_ID = 2**31 - 1
SMALLEST_TOP_P = 1e-6
_SEED_MASK = 2**64 - 1


@dataclass(eq=False)
class ActiveRequest:
    """A request and how far it is. Its unfinished completions decode in lockstep, one strip of the cache each."""

    request: GenerateRequest
    reply: Future[GenerateReply]
    """Where the answer goes; a client that no longer waits cancels it."""
    on_tokens: Callable[[list[NewToken]], object] | None = None
    """Told every token as it is drawn."""
    where: KvRange = field(init=False)
    """Given when the request is admitted."""
    num_prefilled: int = 0
    num_generated: int = 0
    tokens: NDArray[np.int64] = field(init=False)
    logprobs: NDArray[np.float32] = field(init=False)
    strips: NDArray[np.int64] = field(init=False)
    """The completion that each strip of the cache holds."""
    finished: dict[int, tuple[int, FinishReason]] = field(default_factory=dict)
    """Length and reason of the completions that are done."""

    def __post_init__(self) -> None:
        shape = (len(self.request.seeds), self.request.sampling.max_tokens)
        self.tokens, self.logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        self.strips = np.arange(shape[0])
        self._seeds = np.array([seed & _SEED_MASK for seed in self.request.seeds], np.uint64)

    @property
    def num_active(self) -> int:
        return len(self.strips)

    def active_seeds(self) -> NDArray[np.uint64]:
        return self._seeds[self.strips]

    def last_tokens(self) -> NDArray[np.int64]:
        return self.tokens[self.strips, self.num_generated - 1]

    def append(self, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        """Add one token to every unfinished completion."""
        self.tokens[self.strips, self.num_generated] = tokens
        self.logprobs[self.strips, self.num_generated] = logprobs
        self.num_generated += 1

    def finish_strip(self, strip: int, reason: FinishReason) -> int:
        """End the completion of this strip. The last strip takes its place: returns which one must be moved here."""
        self.finished[int(self.strips[strip])] = (self.num_generated, reason)
        last = self.num_active - 1
        self.strips[strip] = self.strips[last]
        self.strips = self.strips[:last]
        return last

    def newest(self, completions: NDArray[np.int64]) -> list[NewToken]:
        """The last token of these completions, which were unfinished before it."""
        last = self.num_generated - 1
        return [
            NewToken(index, int(self.tokens[index, last]), float(self.logprobs[index, last]), self._reason(index))
            for index in completions.tolist()
        ]

    def _reason(self, index: int) -> FinishReason | None:
        return self.finished[index][1] if index in self.finished else None

    def completions(self) -> list[Completion]:
        """The finished completions in the order of the seeds."""
        return [
            Completion(self.tokens[index, :length].tolist(), self.logprobs[index, :length].tolist(), reason)
            for index, (length, reason) in sorted(self.finished.items())
        ]


class Scheduler:
    """Admits requests while batch rows and cache slots are free, and cuts prompts into chunks."""

    def __init__(self, *, max_rows: int, num_slots: int, context_length: int, vocab_size: int):
        self.max_rows = max_rows
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.waiting: deque[ActiveRequest] = deque()
        self.prefilling: list[ActiveRequest] = []
        self.running: list[ActiveRequest] = []
        self._slots = SlotAllocator(num_slots)

    def check(self, request: GenerateRequest) -> None:
        """Refuse at once what is malformed or could never run."""
        prompt_length, num_rows, sampling = len(request.prompt_ids), len(request.seeds), request.sampling
        if not prompt_length or not num_rows or sampling.max_tokens < 1:
            raise Refused("a request needs prompt ids, at least one seed and max_tokens of at least 1")
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self.vocab_size:
            raise Refused(f"prompt ids must be from 0 to {self.vocab_size - 1}")
        if (
            not sampling.temperature >= 0
            or not SMALLEST_TOP_P <= sampling.top_p <= 1
            or not 0 <= sampling.top_k <= MAX_ID
        ):
            raise Refused(
                f"temperature must not be negative, top_p from {SMALLEST_TOP_P:g} to 1, top_k from 0 to {MAX_ID}"
            )
        if not all(0 <= token_id <= MAX_ID for token_id in sampling.stop_token_ids):
            raise Refused(f"stop token ids must be from 0 to {MAX_ID}")
        if prompt_length + sampling.max_tokens > self.context_length:
            raise TooLarge(
                f"prompt of {prompt_length} and max_tokens={sampling.max_tokens} exceed "
                f"engine.context_length={self.context_length}"
            )
        if num_rows > self.max_rows:
            raise TooLarge(f"{num_rows} completions exceed engine.max_batch={self.max_rows}")
        if (slots := self._slots_of(request)) > self._slots.num_slots:
            raise TooLarge(f"the request needs {slots} tokens of cache, engine.kv_tokens={self._slots.num_slots}")

    def add(self, request: ActiveRequest) -> None:
        self.waiting.append(request)

    @property
    def num_rows_running(self) -> int:
        return sum(request.num_active for request in [*self.prefilling, *self.running])

    @property
    def num_rows_admitted(self) -> int:
        """Rows that were given to requests still unfinished, those of their finished completions included."""
        return sum(len(request.request.seeds) for request in [*self.prefilling, *self.running])

    @property
    def num_slots_used(self) -> int:
        return self._slots.num_slots - self._slots.num_free

    def admit(self) -> None:
        """Start waiting requests in arrival order, as long as the next one fits: none is overtaken, so none starves."""
        while self.waiting:
            active = self.waiting[0]
            request = active.request
            if self.num_rows_running + len(request.seeds) > self.max_rows:
                return
            start = self._slots.allocate(self._slots_of(request))
            if start is None:
                return
            active.where = KvRange(start, len(request.prompt_ids), len(request.seeds), request.sampling.max_tokens)
            self.prefilling.append(self.waiting.popleft())

    def prefill_chunks(self) -> Iterator[tuple[ActiveRequest, list[int]]]:
        """The prompt tokens of the next pass: one chunk at least, and as many as fill it up beside the rows that decode.

        Prompts join one after another instead of all at once, so that groups also end one after another, early.
        """
        num_rows = sum(request.num_active for request in self.running)
        is_first = True
        for active in list(self.prefilling):
            prompt_ids = active.request.prompt_ids
            while active.num_prefilled < len(prompt_ids):
                chunk = prompt_ids[active.num_prefilled : active.num_prefilled + PREFILL_CHUNK]
                if not is_first and num_rows + len(chunk) > ROWS_PER_PASS:
                    return
                yield active, chunk
                active.num_prefilled += len(chunk)
                num_rows += len(chunk)
                is_first = False

    def start_decoding(self, request: ActiveRequest) -> None:
        self.prefilling.remove(request)
        self.running.append(request)

    def retire(self, request: ActiveRequest) -> None:
        """Free what a finished or abandoned request holds."""
        if request in self.waiting:
            self.waiting.remove(request)
            return
        (self.running if request in self.running else self.prefilling).remove(request)
        self._slots.free(request.where.start, request.where.num_slots)

    def unfinished(self) -> list[ActiveRequest]:
        return [*self.running, *self.prefilling, *self.waiting]

    def _slots_of(self, request: GenerateRequest) -> int:
        return slots_needed(len(request.prompt_ids), len(request.seeds), request.sampling.max_tokens)
