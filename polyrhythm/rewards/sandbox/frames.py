"""What the reward pool and its workers say to each other: msgpack behind a four-byte length."""

import struct
from typing import Any, BinaryIO, TypeVar

import msgspec

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 64 * 2**20

T = TypeVar("T")


class RewardFunction(msgspec.Struct, frozen=True):
    """A function that scores a run: where it is, what its values are called, and what they count in the sum."""

    spec: str
    """`module:function`, `/absolute/file.py:function`, or `/absolute/host.sock:function` of a process that holds it."""
    name: str
    weight: float = 1.0
    options: dict[str, Any] | None = None
    """Not None: what `spec` names is a factory, and these are its keyword arguments."""


class WorkerSetup(msgspec.Struct, frozen=True):
    """The first frame that a worker reads: what it is for, and what it may have."""

    functions: list[RewardFunction]
    memory_mb: int = 0
    environment: list[str] = []
    """Variables that it may see beside those that every worker sees."""


class RewardSignature(msgspec.Struct, frozen=True):
    """What a function asks for."""

    function: str
    required: list[str]
    """The columns that it cannot be called without."""
    groups_per_call: int = 1
    compares_completions: bool = False
    per_completion: bool = False


class Hello(msgspec.Struct, frozen=True):
    """The worker's first frame: the rewards are imported and ask for this, or why they are not."""

    error: str | None
    signatures: list[RewardSignature] = []


class TrainingState(msgspec.Struct, frozen=True):
    """What a function is told as `trainer_state`, under the names of transformers' TrainerState."""

    global_step: int = 0
    """Steps that are finished: 0 in the first."""
    max_steps: int = 0
    epoch: float = 0.0


class GroupToScore(msgspec.Struct, frozen=True):
    """A problem and its completions; the lists have one item for each of them."""

    columns: dict[str, Any]
    prompt: str | list[dict[str, Any]]
    completions: list[str]
    completion_ids: list[list[int]]
    finish_reason: list[str]

    def one_by_one(self) -> list["GroupToScore"]:
        """A group for each completion."""
        return [
            GroupToScore(self.columns, self.prompt, [text], [ids], [reason])
            for text, ids, reason in zip(self.completions, self.completion_ids, self.finish_reason, strict=True)
        ]


class ScoreRequest(msgspec.Struct, frozen=True):
    groups: list[GroupToScore]
    state: TrainingState = TrainingState()


class PackedScoreRequest(msgspec.Struct, frozen=True):
    """A ScoreRequest whose groups are packed already: one that cannot be sent is found before it is put with others."""

    groups: list[msgspec.Raw]
    state: TrainingState


class RewardFailure(msgspec.Struct, frozen=True):
    """What went wrong: in one line, and the traceback if the user's code has raised it."""

    error: str
    traceback: str | None = None
    origin: str = ""
    """The type of the error and the line that raised it: equal for errors that differ in their values alone."""


class GroupScores(msgspec.Struct, frozen=True):
    """What the completions of a group are worth; the lists have one item for each of them.

    A reward is None if a function failed, which `failures` then says, or if no function applies to the completion.
    """

    rewards: list[float | None]
    scores: dict[str, list[float | None]] = {}
    """By function, before weighting; None where it does not apply or has failed."""
    failures: dict[int, RewardFailure] = {}
    repeated: list[RewardFailure] = []
    """Calls for several completions that failed and were made again for each of them."""
    extra: dict[str, list[Any]] = {}
    metrics: dict[str, list[float]] = {}


class ScoreReply(msgspec.Struct, frozen=True):
    groups: list[GroupScores]


def pack_frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


def split_frame(received: bytes, kind: type[T]) -> T | None:
    """The first frame of what was received; None when it is not complete."""
    if len(received) < HEADER.size:
        return None
    end = HEADER.size + HEADER.unpack_from(received)[0]
    return msgspec.msgpack.decode(received[HEADER.size : end], type=kind) if len(received) >= end else None


def read_frame(stream: BinaryIO, kind: type[T]) -> T | None:
    """The next frame of a blocking stream; None at its end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    body = stream.read(length)
    return msgspec.msgpack.decode(body, type=kind) if len(body) == length else None
