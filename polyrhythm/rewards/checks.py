"""What can be known of rewards before a run starts: that a worker can import them, and that problems have what they need."""

import os
import subprocess

from polyrhythm.errors import UserError
from polyrhythm.rewards.sandbox.calling import with_ground_truth
from polyrhythm.rewards.sandbox.frames import Hello, RewardSignature, WorkerSetup, pack_frame, read_frame, split_frame
from polyrhythm.rewards.sandbox.process import (
    PID,
    START_DEADLINE_S,
    WORKER_COMMAND,
    WorkerLost,
    connect_to_host,
    socket_of_host,
    worker_environment,
)
from polyrhythm.types import Problem


def import_in_worker(setup: WorkerSetup) -> list[RewardSignature]:
    """What the rewards ask for; UserError unless a worker, with its scrubbed environment and its limits, can import them."""
    for name in setup.environment:
        if name not in os.environ:
            raise UserError(f"reward.environment has {name!r}, which is not set: export it, or remove it from the list")
    hello = _hello_of_forked(setup) if socket_of_host(setup) else _hello_of_spawned(setup)
    if hello.error is not None:
        raise UserError(hello.error)
    return hello.signatures


def _hello_of_spawned(setup: WorkerSetup) -> Hello:
    named = " and ".join(repr(function.spec) for function in setup.functions)
    try:
        done = subprocess.run(
            WORKER_COMMAND,
            env=worker_environment(setup.environment),
            input=pack_frame(setup),
            capture_output=True,
            timeout=START_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"reward {named}: importing it took longer than {START_DEADLINE_S:.0f} s") from error
    hello = split_frame(done.stdout, Hello)
    if hello is None:
        last_line = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise UserError(f"reward {named} ended its worker (exit code {done.returncode}) on importing it: {last_line}")
    return hello


def _hello_of_forked(setup: WorkerSetup) -> Hello:
    """Without an event loop: a notebook has one that is running."""
    try:
        with connect_to_host(socket_of_host(setup) or "") as connection, connection.makefile("rb") as replies:
            connection.settimeout(START_DEADLINE_S)
            connection.sendall(pack_frame(setup))
            hello = read_frame(replies, Hello) if replies.read(PID.size) else None
    except WorkerLost as error:
        raise UserError(str(error)) from error
    except TimeoutError as error:
        raise UserError(f"making the rewards took longer than {START_DEADLINE_S:.0f} s") from error
    if hello is None:
        raise UserError("the worker of the rewards ended before it began: its last words are above")
    return hello


def check_columns(signatures: list[RewardSignature], problem: Problem) -> None:
    """Raise UserError if a reward cannot be called with what the problem has."""
    for signature in signatures:
        columns = with_ground_truth(problem.columns) if signature.per_completion else problem.columns
        missing = [name for name in signature.required if name not in columns]
        if missing:
            there_are = f"only {', '.join(problem.columns)}" if problem.columns else "none"
            raise UserError(
                f"reward {signature.function!r} needs the column {missing[0]!r}, and problem {problem.index} has "
                f"{there_are}: add it to the problems, or give the parameter {missing[0]!r} a default"
            )
