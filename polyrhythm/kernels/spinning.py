"""OpenMP threads spin before they sleep on a quiet machine, and sleep at once while other processes want the cores.

A thread that waits for a partner spins for a moment, because waking a sleeping thread for every small operation costs a
fifth of the time on virtual machines. When the partner's core is taken by another process, that moment is always spent in
vain: decoding with two threads beside five busy processes did half of its work per CPU second. The number of threads stays,
so the numbers that are computed stay the same bit for bit.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

PERIOD_S = 0.5
CROWDED_SHARE = 0.25
"""Threads that want to run and wait for a core this share of the time compete with other processes."""
QUIET_SHARE = 0.1
MIN_SEEN_S = 0.1
"""A process that hardly wanted to run has learnt nothing about the machine."""
_END_DEADLINE_S = 5.0
_TASKS = Path("/proc/self/task")

log = logging.getLogger(__name__)

Times = dict[str, tuple[int, int]]
"""Nanoseconds that each thread of this process has run, and has waited for a core."""


class SpinControl:
    """`with SpinControl():` around the work of a process. It does nothing where libgomp or Linux's schedstat are missing."""

    def __init__(self, read_times: Callable[[], Times] | None = None, period_s: float = PERIOD_S):
        self._read_times = read_times or read_thread_times
        self._period_s = period_s
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="spin-control", daemon=True)
        self._has_said_why_not = False
        self.sleeper: SleepAtOnce | None = None
        """There while threads must sleep at once."""

    def __enter__(self) -> "SpinControl":
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join(_END_DEADLINE_S)

    def _watch(self) -> None:
        """Consumes the times of all threads, produces a decision per period, ends with the block."""
        before = self._read_times()
        while before and not self._ended.wait(self._period_s):
            now = self._read_times()
            share = waiting_share(before, now)
            before = now
            if share is not None:
                self._decide(share)
        self._spin()

    def _decide(self, share: float) -> None:
        if share >= CROWDED_SHARE and self.sleeper is None:
            self._sleep_at_once(share)
        elif share < QUIET_SHARE:
            self._spin()

    def _sleep_at_once(self, share: float) -> None:
        if gomp := _libgomp():
            log.info("threads waited %.0f%% of the time for a core: they sleep at once when they wait", 100 * share)
            self.sleeper = SleepAtOnce(gomp)
        elif not self._has_said_why_not:
            self._has_said_why_not = True
            log.info(
                "threads waited %.0f%% of the time for a core, but keep spinning when they wait: only libgomp can be told "
                "to let them sleep, and this process uses another OpenMP library", 100 * share,
            )  # fmt: skip

    def _spin(self) -> None:
        if self.sleeper is not None:
            self.sleeper.close()
            self.sleeper = None


class SleepAtOnce:
    """As long as it is open, no OpenMP thread of this process spins before it sleeps.

    libgomp does so by itself while it manages more threads than there are cores (and OMP_WAIT_POLICY is PASSIVE). There
    is no call to ask for it, so a thread of ours keeps a pool of sleeping threads; they end with it.
    """

    def __init__(self, gomp: ctypes.CDLL):
        self._closed = threading.Event()
        self._holder = threading.Thread(target=self._hold, args=(gomp,), name="pool-holder", daemon=True)
        self._holder.start()

    def close(self) -> None:
        self._closed.set()
        self._holder.join(_END_DEADLINE_S)

    def _hold(self, gomp: ctypes.CDLL) -> None:
        do_nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # free(NULL), in each thread of the pool
        gomp.GOMP_parallel(do_nothing, None, ctypes.c_uint(gomp.omp_get_num_procs() + 1), ctypes.c_uint(0))
        self._closed.wait()


def waiting_share(before: Times, now: Times) -> float | None:
    """Which share of the time that threads wanted to run they waited for a core; None if they hardly wanted to."""
    ran, waited = 0, 0
    for thread, (ran_ns, waited_ns) in now.items():
        ran_before_ns, waited_before_ns = before.get(thread, (ran_ns, waited_ns))
        ran += ran_ns - ran_before_ns
        waited += waited_ns - waited_before_ns
    return waited / (ran + waited) if ran + waited >= MIN_SEEN_S * 1e9 else None


def read_thread_times() -> Times:
    """From Linux's schedstat; empty where there is none."""
    times = {}
    for path in _TASKS.glob("*/schedstat"):
        try:
            ran_ns, waited_ns, _ = path.read_text().split()
        except (OSError, ValueError):  # a thread that has just ended, or a kernel that does not count
            continue
        times[path.parent.name] = (int(ran_ns), int(waited_ns))
    return times


@cache
def _libgomp() -> ctypes.CDLL | None:
    """The OpenMP library that torch has loaded, if it is libgomp."""
    try:
        return ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):  # another OpenMP, or another system
        return None
