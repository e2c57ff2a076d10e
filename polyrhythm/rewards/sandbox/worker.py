"""A reward worker, `python -m polyrhythm.rewards.sandbox.worker`: it answers frames on stdin with frames on stdout.

The first frame says which functions it runs. Functions run in its main thread, where they may set alarms.
It ends when its stdin closes, or with the process that started it, even in the middle of a reward that hangs.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import msgspec

from polyrhythm.errors import UserError
from polyrhythm.rewards.functions import make_function
from polyrhythm.rewards.sandbox.calling import Function
from polyrhythm.rewards.sandbox.frames import Hello, ScoreRequest, WorkerSetup, pack_frame, read_frame
from polyrhythm.rewards.sandbox.scoring import Scorer

MAX_FILE_BYTES = 2**30
MAX_OPEN_FILES = 256
PR_SET_PDEATHSIG = 1


def main() -> None:
    end_with_parent()
    requests = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb")
    # What the reward prints, or a child of it reads, must not touch the frames.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    setup = read_frame(requests, WorkerSetup)
    if setup is not None:
        limit_resources(setup.memory_mb)
        serve(setup, requests, results)


def end_with_parent() -> None:
    """A hanging reward that holds the interpreter lock never sees stdin close."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(
    setup: WorkerSetup, requests: BinaryIO, results: BinaryIO, held: Mapping[str, Callable[..., Any]] | None = None
) -> None:
    """Consumes score requests, produces a reply to each, waits for the next; ends at end of file."""

    def say(message: msgspec.Struct) -> None:
        results.write(pack_frame(message))
        results.flush()

    try:
        functions = [Function(reward, make_function(reward, held or {})) for reward in setup.functions]
    except UserError as error:
        say(Hello(error=str(error)))
        return
    scorer = Scorer(functions)
    say(Hello(error=None, signatures=[function.signature for function in functions]))
    while (request := read_frame(requests, ScoreRequest)) is not None:
        say(scorer.score(request))


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


if __name__ == "__main__":
    main()
