"""Reward functions, good and bad, that the tests run in real workers."""

import os
import re
import time
from pathlib import Path


def exact(completions, answer):
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def everything(**columns):
    return len(columns)


def of_messages(prompts, completions):
    assert prompts[0][0]["role"] == "user"
    return [len(messages[0]["content"]) for messages in completions if messages[0]["role"] == "assistant"]


def bare_number(completions):
    return len(completions[0])


async def asynchronous(completion_ids):
    return [sum(completion_ids[0])]


def prints(completions):
    print("this must not reach the frames", flush=True)
    os.write(1, b"nor this")
    return 1


def raises(completions):
    raise KeyError("no such answer")


def bare_assert(completions, answer=None):
    assert completions[0] == answer  # no message


def raises_deep_inside(completions):
    return [_parse(text) for text in completions]


def _parse(text):
    return int(text + "x")


def needs_two(completions, answer, *, unit, prompts=None, hint="", **others):
    return 1


def raises_half_a_character(completions):
    raise ValueError("\ud800")


def not_finite(completions):
    return [float("nan")]


def nothing(completions):
    return [None]


def two_values(completions):
    return [1.0, 2.0]


def text(completions):
    return "1.0"


def environment(variable):
    return os.environ.get(variable[0]) is not None


def hangs_holding_the_lock(completions):
    return re.match(r"(a+)+$", "a" * 60 + "b") is None


def hangs_once(marker):
    if not Path(marker[0]).exists():
        Path(marker[0]).touch()
        time.sleep(600)
    return 1


def dies_once(marker):
    if not Path(marker[0]).exists():
        Path(marker[0]).touch()
        os._exit(7)
    return 1


def dies(completions):
    os._exit(7)


def takes_memory(completions):
    return len(bytearray(2**30))


def writes_a_large_file(path):
    with open(path[0], "wb") as file:
        file.truncate(2**31)
    return 1


def process_id(completions):
    return os.getpid()
