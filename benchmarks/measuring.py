"""What benchmarks of a part in one process share: the environment of a run's processes, and peak memory."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from polyrhythm.cluster.cores import process_environment

_MARK = "POLYRHYTHM_BENCHMARK_CHILD"


def run_as_a_trainer_does(threads: int) -> None:
    """Start this script again with the environment that a run gives its trainer; it must be set before torch is imported."""
    if _MARK not in os.environ:
        environment = process_environment(threads) | {_MARK: "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def peak_megabytes_of(work: Callable[[], object]) -> float:
    """Peak resident memory of some work above what the process holds before it."""
    before = status_megabytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the earlier peak
    work()
    return status_megabytes("VmHWM") - before


def status_megabytes(field: str) -> float:
    """Of this process: VmRSS is what it holds now, VmHWM the most that it held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory is read on Linux only")
