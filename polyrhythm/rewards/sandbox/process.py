"""A reward worker as the pool sees it: a process that is asked one thing at a time and can be killed."""

import asyncio
import contextlib
import os
import signal
import socket
import struct
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
STDERR = 2
PID = struct.Struct("<q")
"""What a forked worker says first."""
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

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: Process | None):
        self.pid = pid
        self.signatures: list[RewardSignature] = []
        self._reader, self._writer = reader, writer
        self._process = process
        """None if it was forked by another process than this."""

    @classmethod
    async def start(cls, setup: WorkerSetup) -> Self:
        host = socket_of_host(setup)
        try:
            worker = await cls._spawn(setup) if host is None else await cls._fork(host)
        except TimeoutError:
            raise
        except OSError as error:  # no memory or no processes left, for the moment
            raise WorkerLost(f"a reward worker cannot be started: {error}") from error
        try:
            hello = await worker._exchange(pack_frame(setup), Hello, START_DEADLINE_S)
            if hello.error is not None:
                raise WorkerLost(hello.error)
        except BaseException:
            await worker.kill()
            raise
        worker.signatures = hello.signatures
        return worker

    @classmethod
    async def _spawn(cls, setup: WorkerSetup) -> Self:
        # A session of its own: killing the group ends what the reward started, and Ctrl-C reaches only the pool.
        process = await asyncio.create_subprocess_exec(
            *WORKER_COMMAND,
            stdin=PIPE,
            stdout=PIPE,
            env=worker_environment(setup.environment),
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        return cls(process.pid, process.stdout, process.stdin, process)

    @classmethod
    async def _fork(cls, host: str) -> Self:
        connection = connect_to_host(host)
        async with asyncio.timeout(START_DEADLINE_S):
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            try:
                (pid,) = PID.unpack(await reader.readexactly(PID.size))
            except asyncio.IncompleteReadError:
                raise WorkerLost("the host of the rewards could not fork a worker") from None
        return cls(pid, reader, writer, None)

    async def ask(self, frame: bytes, deadline_s: float) -> ScoreReply:
        return await self._exchange(frame, ScoreReply, deadline_s)

    async def _exchange(self, frame: bytes, kind: type[T], deadline_s: float) -> T:
        """Say one thing and hear one thing."""
        async with asyncio.timeout(deadline_s):
            try:
                self._writer.write(frame)
                await self._writer.drain()
                (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if length > MAX_FRAME_BYTES:
                    raise WorkerLost(f"the reward worker announced a frame of {length} bytes")
                return msgspec.msgpack.decode(await self._reader.readexactly(length), type=kind)
            except ConnectionError as error:
                raise WorkerLost(f"the reward worker ended: {error}") from error
            except asyncio.IncompleteReadError as error:
                raise WorkerLost("the reward worker died") from error
            except msgspec.DecodeError as error:
                raise WorkerLost(f"the reward worker sent a broken frame: {error}") from error

    async def close(self) -> None:
        """Let an idle worker end by itself, for its exit handlers; kill it if it does not."""
        try:
            if self._writer.can_write_eof():
                self._writer.write_eof()
            await self._wait(CLOSE_DEADLINE_S)
        except TimeoutError:
            await self.kill()
        finally:
            self._writer.close()

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._wait(CLOSE_DEADLINE_S)
        self._writer.close()

    async def _wait(self, deadline_s: float) -> None:
        """Until the process has ended, or all that could be read from it."""
        async with asyncio.timeout(deadline_s):
            if self._process is not None:
                await self._process.wait()
            else:
                with contextlib.suppress(ConnectionError):
                    await self._reader.read()


def socket_of_host(setup: WorkerSetup) -> str | None:
    """Where workers are forked that have functions which nobody can import; None if there are none."""
    paths = {path for function in setup.functions if (path := function.spec.rpartition(":")[0]).endswith(".sock")}
    return min(paths, default=None)


def connect_to_host(path: str) -> socket.socket:
    """A connection to a worker that the host forks for it; the worker logs to where this process does."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        socket.send_fds(connection, [b"\0"], [STDERR])
    except OSError as error:
        connection.close()
        raise WorkerLost(
            "the rewards were functions of a script or a notebook that has ended: run it again; polyrhythm.train("
            "resume=..., rewards=[...]) goes on with its run"
        ) from error
    return connection


def worker_environment(more: Sequence[str] = ()) -> dict[str, str]:
    """What a worker may see of the environment: paths and language, never tokens or keys that are not named."""
    allowed = {*ALLOWED_VARIABLES, *more}
    environment = {name: value for name, value in os.environ.items() if name in allowed or name.startswith("LC_")}
    package_parent = str(Path(polyrhythm.__file__).resolve().parents[1])
    inherited_path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{package_parent}{os.pathsep}{inherited_path}" if inherited_path else package_parent
    environment["OMP_NUM_THREADS"] = "1"
    return environment
