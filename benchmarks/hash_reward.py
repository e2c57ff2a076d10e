"""A reward that costs nothing and differs between the completions of a group: both sides of against_trl.py use it."""

import zlib


def score(completions: list[str], **_: object) -> list[float]:
    """A number in [0, 1) per completion, drawn from its text."""
    return [zlib.crc32(completion.encode()) / 2**32 for completion in completions]
