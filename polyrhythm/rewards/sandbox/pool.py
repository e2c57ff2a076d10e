"""The pool of reward workers: each scores one rollout at a time and is killed when it misses the deadline."""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import PIPE, Process
from typing import Any, Self, TypeVar

import msgspec

from polyrhythm.errors import RunError
from polyrhythm.rewards.functions import START_DEADLINE_S, worker_command, worker_environment
from polyrhythm.rewards.sandbox.frames import HEADER, MAX_FRAME_BYTES, Hello, RewardResult, ScoreRequest, pack_frame
from polyrhythm.types import ChatMessage

CLOSE_DEADLINE_S = 2.0
MAX_TIMEOUTS, MAX_DEATHS = 2, 3

T = TypeVar("T")


class WorkerLost(Exception):
    """The worker ended, or said something that is no frame."""


class Worker:
    """One worker process. After any failure it must be killed: an answer to an earlier question may be under way."""

    def __init__(self, process: Process):
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, rewards: dict[str, float], memory_mb: int) -> Self:
        # A session of its own: killing the group ends what the reward started, and Ctrl-C reaches only the pool.
        process = await asyncio.create_subprocess_exec(
            *worker_command(rewards, memory_mb),
            stdin=PIPE,
            stdout=PIPE,
            env=worker_environment(),
            start_new_session=True,
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                hello = await worker._receive(Hello)
            if hello.error is not None:
                raise WorkerLost(hello.error)
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def ask(self, frame: bytes, deadline_s: float) -> RewardResult:
        stdin = self._process.stdin
        assert stdin is not None
        async with asyncio.timeout(deadline_s):
            try:
                stdin.write(frame)
                await stdin.drain()
            except (BrokenPipeError, ConnectionResetError) as error:
                raise WorkerLost(f"the reward worker ended: {error}") from error
            return await self._receive(RewardResult)

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


class RewardPool:
    """Scores rollouts in `num_workers` processes; `rewards` are functions, as `module:function`, with their weights.

    async with RewardPool({"my_rewards:score": 1.0}, num_workers=2, deadline_s=10) as rewards:
        result = await rewards.score({"answer": 4}, "2+2=", "4", [52])
    """

    def __init__(self, rewards: dict[str, float], num_workers: int, deadline_s: float, memory_mb: int = 0):
        self._rewards = rewards
        self._memory_mb = memory_mb
        self._num_workers = num_workers
        self._deadline_s = deadline_s
        # None stands for a worker that was lost: whoever takes it starts a new one.
        self._idle: asyncio.Queue[Worker | None] = asyncio.Queue()
        self.num_workers_lost = 0

    async def __aenter__(self) -> "RewardPool":
        try:
            async with asyncio.TaskGroup() as tasks:
                starts = [tasks.create_task(self._start_worker()) for _ in range(self._num_workers)]
        except* (WorkerLost, TimeoutError) as group:
            raise RunError(f"reward worker did not start: {group.exceptions[0]}") from group
        for start in starts:
            self._idle.put_nowait(start.result())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        async with asyncio.TaskGroup() as tasks:
            while not self._idle.empty():
                if worker := self._idle.get_nowait():
                    tasks.create_task(worker.close())

    async def score(
        self, columns: dict[str, Any], prompt: str | list[ChatMessage], completion_text: str, completion_ids: list[int]
    ) -> RewardResult:
        """The reward, or None with the error. A worker that hangs gets one more attempt, one that dies two: dying is quick."""
        try:
            frame = pack_frame(ScoreRequest(columns, prompt, completion_text, completion_ids))
        except (TypeError, ValueError, OverflowError) as error:
            return RewardResult(reward=None, error=f"the problem's columns cannot be sent to a worker: {error}")
        num_deaths = num_timeouts = 0
        while True:
            try:
                return await self._ask_idle_worker(frame)
            except TimeoutError:
                num_timeouts += 1
                if num_timeouts == MAX_TIMEOUTS:
                    return RewardResult(reward=None, error=f"the reward took longer than {self._deadline_s:g} s")
            except WorkerLost as error:
                num_deaths += 1
                if num_deaths == MAX_DEATHS:
                    return RewardResult(reward=None, error=str(error))

    async def _start_worker(self) -> Worker:
        return await Worker.start(self._rewards, self._memory_mb)

    async def _ask_idle_worker(self, frame: bytes) -> RewardResult:
        worker = await self._idle.get()
        healthy = False
        try:
            worker = worker or await self._start_worker()
            result = await worker.ask(frame, self._deadline_s)
            healthy = True
            return result
        finally:
            self._idle.put_nowait(worker if healthy else None)
            if not healthy:
                self.num_workers_lost += 1
                if worker is not None:
                    await worker.kill()
