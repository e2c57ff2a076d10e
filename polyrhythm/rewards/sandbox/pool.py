"""The pool of reward workers: each is asked about one group at a time and is killed when it misses the deadline."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from polyrhythm.errors import RunError
from polyrhythm.rewards.sandbox.frames import (
    GroupScores,
    GroupToScore,
    PackedScoreRequest,
    RewardFailure,
    ScoreReply,
    TrainingState,
    WorkerSetup,
    pack_frame,
)
from polyrhythm.rewards.sandbox.process import Worker, WorkerLost

MAX_TIMEOUTS, MAX_DEATHS = 2, 3


@dataclass(eq=False)
class _Asked:
    """A group for a worker, and the promise of its scores to who has asked."""

    group: GroupToScore
    packed: msgspec.Raw
    state: TrainingState
    scores: asyncio.Future[GroupScores] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_taken: bool = False

    def answer(self, scores: GroupScores) -> None:
        if not self.scores.done():  # who has asked may be gone
            self.scores.set_result(scores)


class _NoAnswer(Exception):
    """Why a worker has not answered, however often it was asked."""


class RewardPool:
    """Scores groups in `num_workers` processes.

    setup = WorkerSetup([RewardFunction("my_rewards:score", "score")])
    async with RewardPool(setup, num_workers=2, deadline_s=30) as rewards:
        scores = await rewards.score(GroupToScore({"answer": 4}, "2+2=", ["4", "5"], [[52], [53]], ["stop", "stop"]))
    """

    def __init__(self, setup: WorkerSetup, num_workers: int, deadline_s: float):
        self._setup = setup
        self._num_workers = num_workers
        self._deadline_s = deadline_s
        self._groups_per_call = 1
        self._compares_completions = False
        self._waiting: deque[_Asked] = deque()
        self._idle: asyncio.Queue[_Seat] = asyncio.Queue()
        self._seats: list[_Seat] = []

    @property
    def num_workers_lost(self) -> int:
        return sum(seat.num_lost for seat in self._seats)

    async def __aenter__(self) -> "RewardPool":
        try:
            async with asyncio.TaskGroup() as tasks:
                starts = [tasks.create_task(self._start_worker()) for _ in range(self._num_workers)]
        except* (WorkerLost, TimeoutError) as group:
            raise RunError(f"reward worker did not start: {group.exceptions[0]}") from group
        for worker in (start.result() for start in starts):
            self._groups_per_call = max(signature.groups_per_call for signature in worker.signatures)
            self._compares_completions = any(signature.compares_completions for signature in worker.signatures)
            self._seats.append(seat := _Seat(worker, self._start_worker))
            self._idle.put_nowait(seat)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        async with asyncio.TaskGroup() as tasks:
            while not self._idle.empty():
                if worker := self._idle.get_nowait().worker:
                    tasks.create_task(worker.close())

    async def score(self, group: GroupToScore, state: TrainingState | None = None) -> GroupScores:
        """The scores of a group, by one call of each function.

        A call that hangs gets one more attempt, one whose worker dies two: dying is quick. If that does not help, each
        completion is asked about alone, once, so that the others of its group do not fail with it.
        """
        try:
            asked = _asked(group, state or TrainingState())
        except (TypeError, ValueError, OverflowError) as error:
            return failed(group, RewardFailure(f"the problem's columns cannot be sent to a worker: {error}"))
        self._waiting.append(asked)
        try:
            seat = await self._idle.get()
        except asyncio.CancelledError:
            if not asked.is_taken:
                self._waiting.remove(asked)
            raise
        try:
            while not asked.is_taken:  # others may have waited longer: they first, and this one by whoever has a seat
                await self._answer(seat, self._take_waiting())
        finally:
            self._idle.put_nowait(seat)
        return await asked.scores

    async def _start_worker(self) -> Worker:
        return await Worker.start(self._setup)

    def _take_waiting(self) -> list[_Asked]:
        """The groups of the next call: the one that waits longest, and with it as many as a function wants."""
        taken = [self._waiting.popleft() for _ in range(min(self._groups_per_call, len(self._waiting)))]
        for asked in taken:
            asked.is_taken = True
        return taken

    async def _answer(self, seat: "_Seat", calls: list[_Asked]) -> None:
        """Fulfil the promises of one call, or of the smaller ones that it falls apart into."""
        try:
            replies = await self._ask(seat, calls, MAX_TIMEOUTS, MAX_DEATHS)
            for asked, scores in zip(calls, replies, strict=True):
                asked.answer(scores)
        except _NoAnswer as error:
            if len(calls) > 1:
                for asked in calls:
                    await self._answer(seat, [asked])
            elif self._compares_completions or len(calls[0].group.completions) == 1:
                calls[0].answer(failed(calls[0].group, RewardFailure(str(error))))
            else:
                calls[0].answer(await self._ask_one_by_one(seat, calls[0]))
        except BaseException:
            for asked in calls:
                asked.scores.cancel()
            raise

    async def _ask_one_by_one(self, seat: "_Seat", asked: _Asked) -> GroupScores:
        parts = []
        for part in asked.group.one_by_one():
            try:
                parts += await self._ask(seat, [_asked(part, asked.state)], 1, 1)
            except _NoAnswer as error:
                parts.append(failed(part, RewardFailure(str(error))))
        return _joined(parts)

    async def _ask(self, seat: "_Seat", calls: list[_Asked], max_timeouts: int, max_deaths: int) -> list[GroupScores]:
        frame = pack_frame(PackedScoreRequest([asked.packed for asked in calls], calls[0].state))
        deadline_s = self._deadline_s * len(calls)
        num_deaths = num_timeouts = 0
        while True:
            try:
                return (await seat.ask(frame, deadline_s)).groups
            except TimeoutError:
                num_timeouts += 1
                if num_timeouts == max_timeouts:
                    raise _NoAnswer(f"the reward took longer than {deadline_s:g} s") from None
            except WorkerLost as error:
                num_deaths += 1
                if num_deaths == max_deaths:
                    raise _NoAnswer(str(error)) from error


class _Seat:
    """A worker's place in the pool: one that is lost is replaced when the place is needed again."""

    def __init__(self, worker: Worker, start_worker: Callable[[], Awaitable[Worker]]):
        self.worker: Worker | None = worker
        self.num_lost = 0
        self._start_worker = start_worker

    async def ask(self, frame: bytes, deadline_s: float) -> ScoreReply:
        worker, healthy = self.worker, False
        try:
            worker = worker or await self._start_worker()
            reply = await worker.ask(frame, deadline_s)
            healthy = True
            return reply
        finally:
            self.worker = worker if healthy else None
            if not healthy:
                self.num_lost += 1
                if worker is not None:
                    await worker.kill()


def failed(group: GroupToScore, failure: RewardFailure) -> GroupScores:
    """The scores of a group whose every reward failed in this way."""
    num = len(group.completions)
    return GroupScores(rewards=[None] * num, failures=dict.fromkeys(range(num), failure))


def _asked(group: GroupToScore, state: TrainingState) -> _Asked:
    return _Asked(group, msgspec.Raw(msgspec.msgpack.encode(group)), state)


def _joined(parts: Sequence[GroupScores]) -> GroupScores:
    """The scores of a group whose completions were asked about one by one."""
    num = len(parts)
    whole = GroupScores(rewards=[part.rewards[0] for part in parts], scores={}, failures={}, extra={}, metrics={})
    for place, part in enumerate(parts):
        if failure := part.failures.get(0):
            whole.failures[place] = failure
        for name, values in part.scores.items():
            whole.scores.setdefault(name, [None] * num)[place] = values[0]
        for name, values in part.extra.items():
            whole.extra.setdefault(name, [None] * num)[place] = values[0]
        for name, numbers in part.metrics.items():
            whole.metrics.setdefault(name, []).extend(numbers)
    return whole
