"""Threads that wait sleep at once while the machine is crowded, and spin again when it is quiet."""

import ctypes
import os
import time
from pathlib import Path

import pytest
import torch

from polyrhythm.kernels import spinning
from polyrhythm.kernels.spinning import CROWDED_SHARE, QUIET_SHARE, SleepAtOnce, SpinControl, waiting_share

SECOND_NS = 10**9
DEADLINE_S = 60.0


def wait_for(condition) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.002)


@pytest.fixture
def gomp() -> ctypes.CDLL:
    return spinning._libgomp() or pytest.skip("torch has no libgomp here")


class Machine:
    """Thread times of a machine that gives each thread a share of the time it wants."""

    def __init__(self) -> None:
        self.share = 0.0
        self.ran_ns = self.waited_ns = 0

    def read_times(self) -> dict[str, tuple[int, int]]:
        self.ran_ns += int((1 - self.share) * SECOND_NS)
        self.waited_ns += int(self.share * SECOND_NS)
        return {"compute": (self.ran_ns, self.waited_ns)}


def test_the_share_is_that_of_threads_that_were_there_before():
    before = {"1": (0, 0), "2": (5 * SECOND_NS, 0)}
    now = {"1": (SECOND_NS, SECOND_NS), "2": (6 * SECOND_NS, SECOND_NS), "new": (SECOND_NS, 9 * SECOND_NS)}
    assert waiting_share(before, now) == 0.5


def test_a_process_that_hardly_ran_knows_nothing():
    assert waiting_share({"1": (0, 0)}, {"1": (10**6, 10**6)}) is None


@pytest.mark.usefixtures("gomp")
def test_threads_sleep_at_once_from_crowded_until_quiet():
    machine = Machine()
    with SpinControl(machine.read_times, period_s=0.001) as control:
        machine.share = CROWDED_SHARE + 0.01
        wait_for(lambda: control.sleeper is not None)
        machine.share = (CROWDED_SHARE + QUIET_SHARE) / 2
        time.sleep(0.02)
        assert control.sleeper is not None, "it does not go back and forth"
        machine.share = QUIET_SHARE / 2
        wait_for(lambda: control.sleeper is None)
        machine.share = 1.0
        wait_for(lambda: control.sleeper is not None)
    assert control.sleeper is None, "nothing is left of it"


def test_it_does_nothing_where_times_are_not_known():
    with SpinControl(dict, period_s=0.001) as control:
        control._watcher.join(DEADLINE_S)
        assert control.sleeper is None


def test_it_says_once_that_threads_keep_spinning_with_another_openmp_library(monkeypatch, caplog):
    monkeypatch.setattr(spinning, "_libgomp", lambda: None)
    control = SpinControl()
    with caplog.at_level("INFO"):
        for share in (CROWDED_SHARE, 0.0, 1.0, 1.0):
            control._decide(share)
    assert control.sleeper is None
    (said,) = caplog.messages
    assert "25% of the time" in said and "keep spinning" in said and "another OpenMP library" in said


def test_its_pool_has_more_threads_than_cores_and_ends_with_it(gomp):
    before = threads()
    sleeper = SleepAtOnce(gomp)
    wait_for(lambda: len(threads() - before) > len(os.sched_getaffinity(0)))
    pool = threads() - before
    assert len(pool) > len(os.sched_getaffinity(0))
    sleeper.close()
    wait_for(lambda: not threads() & pool)
    assert not threads() & pool


def test_the_same_bits_are_computed_while_it_is_open(gomp):
    torch.manual_seed(0)
    left, right = torch.randn(64, 576), torch.randn(576, 768)
    expected = left @ right
    sleeper = SleepAtOnce(gomp)
    try:
        assert torch.equal(left @ right, expected)
    finally:
        sleeper.close()


def threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}
