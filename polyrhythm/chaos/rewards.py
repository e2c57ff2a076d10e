"""What a chaos plan does to reward workers: they are killed or stopped while they score."""

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path

from polyrhythm.chaos.plan import Faults, faults_of
from polyrhythm.observe.activity import Activity
from polyrhythm.rewards.sandbox.frames import ScoreReply, WorkerSetup
from polyrhythm.rewards.sandbox.pool import RewardPool
from polyrhythm.rewards.sandbox.process import Worker


def reward_pool(run_dir: Path) -> Callable[..., RewardPool]:
    """The conductor's hook: what makes the pool of reward workers, with the faults of the run's chaos plan."""
    faults = faults_of(run_dir, "reward")
    return functools.partial(FaultyRewardPool, faults=faults) if faults else RewardPool


class FaultyWorker(Worker):
    """Its process may be killed or stopped just before it is asked for the scores of a group."""

    faults: Faults

    async def ask(self, frame: bytes, deadline_s: float) -> ScoreReply:
        if fault := self.faults.due(Activity.SCORE, step=0):
            self.faults.record(fault, 0, f"worker {self.pid}", pid=self.pid)
            os.kill(self.pid, signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)
        return await super().ask(frame, deadline_s)


class FaultyRewardPool(RewardPool):
    """A pool of workers to which the faults of a plan happen."""

    def __init__(self, setup: WorkerSetup, num_workers: int, deadline_s: float, faults: Faults):
        super().__init__(setup, num_workers, deadline_s)
        self._faults = faults

    async def _start_worker(self) -> Worker:
        worker = await FaultyWorker.start(self._setup)
        worker.faults = self._faults
        return worker
