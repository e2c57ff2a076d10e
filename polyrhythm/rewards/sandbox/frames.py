"""What the reward pool and its workers say to each other: msgpack behind a four-byte length."""

import struct
from typing import Any, BinaryIO, TypeVar

import msgspec

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 64 * 2**20

T = TypeVar("T")


class RewardSignature(msgspec.Struct, frozen=True):
    """A reward function and the columns that it cannot be called without."""

    function: str
    required: list[str]


class Hello(msgspec.Struct, frozen=True):
    """The worker's first frame: the rewards are imported and need these columns, or why they are not."""

    error: str | None
    signatures: list[RewardSignature] = []


class ScoreRequest(msgspec.Struct, frozen=True):
    columns: dict[str, Any]
    prompt: str | list[dict[str, str]]
    completion_text: str
    completion_ids: list[int]


class RewardResult(msgspec.Struct, frozen=True):
    """The reward, or None and what went wrong: in one line, and the traceback if the user's code has raised it."""

    reward: float | None
    error: str | None = None
    traceback: str | None = None
    origin: str = ""
    """The type of the error and the line that raised it: equal for errors that differ in their values alone."""


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
