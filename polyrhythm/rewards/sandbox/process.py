"""A reward worker as the pool sees it: a process that is asked one thing at a time and can be killed."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Self, TypeVar

import msgspec

import polyrhythm
from polyrhythm.rewards.sandbox.frames import (
    HEADER,
    MAX_FRAME_BYTES,
    Hello,
    RewardSignature,
    ScoreReply,
    WorkerSetup,
    pack_frame,
)

START_DEADLINE_S = 60.0
CLOSE_DEADLINE_S = 2.0
WORKER_COMMAND = [sys.executable, "-m", "polyrhythm.rewards.sandbox.worker"]
ALLOWED_VARIABLES = {
    *("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME"),
}

T = TypeVar("T")


class WorkerLost(Exception):
    """The worker ended, or said something that is no frame."""


class Worker:
    """One worker process. After any failure it must be killed: an answer to an earlier question may be under way."""

    def __init__(self, process: Process):
        self._process = process
        self.signatures: list[RewardSignature] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, setup: WorkerSetup) -> Self:
        # A session of its own: killing the group ends what the reward started, and Ctrl-C reaches only the pool.
        process = await asyncio.create_subprocess_exec(
            *WORKER_COMMAND,
            stdin=PIPE,
            stdout=PIPE,
            env=worker_environment(setup.environment),
            start_new_session=True,
        )
        worker = cls(process)
        try:
            hello = await worker._exchange(pack_frame(setup), Hello, START_DEADLINE_S)
            if hello.error is not None:
                raise WorkerLost(hello.error)
        except BaseException:
            await worker.kill()
            raise
        worker.signatures = hello.signatures
        return worker

    async def ask(self, frame: bytes, deadline_s: float) -> ScoreReply:
        return await self._exchange(frame, ScoreReply, deadline_s)

    async def _exchange(self, frame: bytes, kind: type[T], deadline_s: float) -> T:
        """Say one thing and hear one thing."""
        stdin = self._process.stdin
        assert stdin is not None
        async with asyncio.timeout(deadline_s):
            try:
                stdin.write(frame)
                await stdin.drain()
            except (BrokenPipeError, ConnectionResetError) as error:
                raise WorkerLost(f"the reward worker ended: {error}") from error
            return await self._receive(kind)

    async def _receive(self, kind: type[T]) -> T:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            (length,) = HEADER.unpack(await stdout.readexactly(HEADER.size))
            if length > MAX_FRAME_BYTES:
                raise WorkerLost(f"the reward worker announced a frame of {length} bytes")
            return msgspec.msgpack.decode(await stdout.readexactly(length), type=kind)
        except asyncio.IncompleteReadError as error:
            raise WorkerLost("the reward worker died") from error
        except msgspec.DecodeError as error:
            raise WorkerLost(f"the reward worker sent a broken frame: {error}") from error

    async def close(self) -> None:
        """Let an idle worker end by itself, for its exit handlers; kill it if it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        async with asyncio.timeout(CLOSE_DEADLINE_S):
            await self._process.wait()


def worker_environment(more: Sequence[str] = ()) -> dict[str, str]:
    """What a worker may see of the environment: paths and language, never tokens or keys that are not named."""
    allowed = {*ALLOWED_VARIABLES, *more}
    environment = {name: value for name, value in os.environ.items() if name in allowed or name.startswith("LC_")}
    package_parent = str(Path(polyrhythm.__file__).resolve().parents[1])
    inherited_path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{package_parent}{os.pathsep}{inherited_path}" if inherited_path else package_parent
    environment["OMP_NUM_THREADS"] = "1"
    return environment
