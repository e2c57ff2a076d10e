"""A reward pool whose workers die or hang by plan. Used only in a run with a chaos plan."""

import os
import signal

from polyrhythm.chaos.plan import Faults
from polyrhythm.observe.activity import Activity
from polyrhythm.rewards.sandbox.frames import RewardResult
from polyrhythm.rewards.sandbox.pool import RewardPool, Worker


class FaultyWorker(Worker):
    """Its process may be killed or stopped just before it is asked for a score."""

    faults: Faults

    async def ask(self, frame: bytes, deadline_s: float) -> RewardResult:
        if fault := self.faults.due(Activity.SCORE, step=0):
            self.faults.record(fault, 0, f"worker {self.pid}", pid=self.pid)
            os.kill(self.pid, signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)
        return await super().ask(frame, deadline_s)


class FaultyRewardPool(RewardPool):
    def __init__(self, rewards: dict[str, float], num_workers: int, deadline_s: float, memory_mb: int, faults: Faults):
        super().__init__(rewards, num_workers, deadline_s, memory_mb)
        self._faults = faults

    async def _start_worker(self) -> Worker:
        worker = await FaultyWorker.start(self._rewards, self._memory_mb)
        worker.faults = self._faults
        return worker
