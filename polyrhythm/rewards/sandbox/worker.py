"""A reward worker: `python -m polyrhythm.rewards.sandbox.worker '{"module:function": weight}' memory_mb`.

It answers frames on stdin with frames on stdout.
It ends when its stdin closes, or with the process that started it, even in the middle of a reward that hangs.
"""

import asyncio
import ctypes
import inspect
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from polyrhythm.errors import UserError
from polyrhythm.rewards.functions import resolve_reward
from polyrhythm.rewards.sandbox.failure import failure_of
from polyrhythm.rewards.sandbox.frames import (
    Hello,
    RewardResult,
    RewardSignature,
    ScoreRequest,
    pack_frame,
    read_frame,
)
from polyrhythm.types import ChatMessage

ALWAYS_OFFERED = ("prompts", "completions", "completion_ids")
MAX_FILE_BYTES = 2**30
MAX_OPEN_FILES = 256
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Consumes score requests, produces one result for each, waits for the next; ends at end of file."""
    if sys.platform == "linux":
        # A hanging reward that holds the interpreter lock never sees stdin close.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    limit_resources(memory_mb=int(sys.argv[2]))
    requests = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb")
    # What the reward prints, or a child of it reads, must not touch the frames.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    try:
        rewards = {name: (resolve_reward(name), weight) for name, weight in json.loads(sys.argv[1]).items()}
    except UserError as error:
        results.write(pack_frame(Hello(error=str(error))))
        results.flush()
        return
    signatures = [RewardSignature(name, required_columns(reward)) for name, (reward, _) in rewards.items()]
    score = make_scorer(list(rewards.values()))
    results.write(pack_frame(Hello(error=None, signatures=signatures)))
    results.flush()
    while (request := read_frame(requests, ScoreRequest)) is not None:
        results.write(pack_frame(score(request)))
        results.flush()


def limit_resources(memory_mb: int) -> None:
    """What a reward may use of the machine; its time is limited by the pool. A limit that is tighter already stays."""
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ]
    if memory_mb:
        limits.append((resource.RLIMIT_AS, memory_mb * 2**20))
    for kind, limit in limits:
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def make_scorer(rewards: list[tuple[Callable[..., Any], float]]) -> Callable[[ScoreRequest], RewardResult]:
    """A function that adds up the rewards, each times its weight; if one of them fails, there is no sum."""
    weighted = [(make_caller(reward), weight) for reward, weight in rewards]

    def score(request: ScoreRequest) -> RewardResult:
        offered = {name: [value] for name, value in request.columns.items()}
        offered |= {
            "prompts": [request.prompt],
            "completions": [_in_the_form_of(request.prompt, request.completion_text)],
            "completion_ids": [request.completion_ids],
        }
        try:
            return RewardResult(reward=sum(weight * call(offered) for call, weight in weighted))
        except Exception as error:  # the user's code may raise anything; its rollout is excluded and counted
            return failure_of(error)

    return score


def make_caller(reward: Callable[..., Any]) -> Callable[[dict[str, Any]], float]:
    """A function that calls the reward by TRL's convention: lists of one, as keywords the signature asks for."""
    parameters = inspect.signature(reward).parameters.values()
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}

    def call(offered: dict[str, Any]) -> float:
        result = reward(**{name: value for name, value in offered.items() if takes_all or name in names})
        return single_number(asyncio.run(result) if inspect.iscoroutine(result) else result)

    return call


def required_columns(reward: Callable[..., Any]) -> list[str]:
    """The parameters without a default that only a problem can give."""
    return [
        parameter.name
        for parameter in inspect.signature(reward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in ALWAYS_OFFERED
    ]


def _in_the_form_of(prompt: str | list[ChatMessage], text: str) -> str | list[ChatMessage]:
    """Text after text; the assistant's message after messages."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def single_number(result: Any) -> float:
    """The reward in what the function returned: a number, or a sequence of one."""
    if hasattr(result, "tolist"):  # numpy arrays and scalars, tensors
        result = result.tolist()
    if isinstance(result, list | tuple):
        if len(result) != 1:
            raise ValueError(f"the reward returned {len(result)} values for one completion")
        result = result[0]
    if result is None:
        raise ValueError("the reward returned None")
    number = float(result) if not isinstance(result, str) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"the reward returned {result!r}, which is not a finite number")
    return number


if __name__ == "__main__":
    main()
