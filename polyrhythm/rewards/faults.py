"""A reward pool whose workers die or hang by plan. Used only in a run with a chaos plan."""

import os
import signal

from polyrhythm.chaos import Faults
from polyrhythm.rewards.frames import RewardResult
from polyrhythm.rewards.pool import RewardPool


class FaultyRewardPool(RewardPool):
    """Before a rollout is scored, an idle worker may be killed or stopped: whoever asks it next finds out."""

    def __init__(self, reward: str, num_workers: int, deadline_s: float, memory_mb: int, faults: Faults):
        super().__init__(reward, num_workers, deadline_s, memory_mb)
        self._faults = faults

    async def _ask_idle_worker(self, frame: bytes) -> RewardResult:
        if not self._idle.empty():
            worker = self._idle.get_nowait()
            self._idle.put_nowait(worker)
            if worker is not None and (fault := self._faults.due("score", step=0)):
                self._faults.witness(fault, 0, f"worker {worker.pid}", pid=worker.pid)
                os.kill(worker.pid, signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)
        return await super()._ask_idle_worker(frame)
