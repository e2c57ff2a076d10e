"""The machine: cores, memory, compiler, shared memory for snapshots, loopback ports."""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from polyrhythm.config import Config
from polyrhythm.devices.memory import gigabytes, snapshot_bytes
from polyrhythm.devices.plan import plan_devices
from polyrhythm.doctor.findings import Finding
from polyrhythm.kernels.compiling import WIDEST_VECTOR
from polyrhythm.kernels.products import product_kernel
from polyrhythm.kernels.switch import kernels_off

SHARED_MEMORY = Path("/dev/shm")
CONNECT_DEADLINE_S = 5.0


def check_machine() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(
        "machine", "ok",
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {num_cores} cores, "
        f"{gigabytes(memory.total)} GB of memory, {gigabytes(memory.available)} free",
        numbers={"cores": num_cores, "memory": memory.total, "memory_free": memory.available, "python": sys.version},
    )  # fmt: skip


def check_kernels() -> Iterator[Finding]:
    if kernels_off():
        yield Finding(
            "kernels", "warning", "switched off by POLYRHYTHM_KERNELS", "unset it to compute faster on the CPU"
        )
    elif product_kernel() is None:
        yield Finding(
            "kernels", "warning", "no C compiler: torch operators are used on the CPU, which is slower",
            "install gcc or clang, or name one in CC",
        )  # fmt: skip
    else:
        yield Finding("kernels", "ok", f"compiled for the CPU, vectors of {WIDEST_VECTOR} numbers at most")


def check_shared_memory(config: Config, model_dir: Path | None) -> Iterator[Finding]:
    if not SHARED_MEMORY.is_dir():
        yield Finding("shared memory", "warning", "there is none: snapshots of weights go to the run folder")
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    needed = (
        (config.weights.keep + 1) * snapshot_bytes(plan_devices(config).decided(config), model_dir) if model_dir else 0
    )
    numbers = {"free": free, "needed": needed}
    text = f"{gigabytes(free)} GB are free in {SHARED_MEMORY}"
    if needed:
        text += f", {config.weights.keep + 1} snapshots of the model are {gigabytes(needed)}"
    if needed > free:
        yield Finding(
            "shared memory", "warning", f"{text}: they will be written to the run folder, which is slower",
            "in a container start it with more (--shm-size), or set weights.root to a folder on a fast disk", numbers,
        )  # fmt: skip
    else:
        yield Finding("shared memory", "ok", text, numbers=numbers)


def check_ports() -> Iterator[Finding]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address, timeout=CONNECT_DEADLINE_S):
            yield Finding("ports", "ok", f"processes can meet on 127.0.0.1 (tried port {address[1]})")
