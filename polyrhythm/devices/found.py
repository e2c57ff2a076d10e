"""The devices of this machine, for a process that has no torch: another one looks and says what it sees.

Looking makes a context on a device, which takes memory there until the process ends: so it is a short one.
"""

import functools
import subprocess
import sys
from pathlib import Path

import msgspec

from polyrhythm.devices import find_accelerator
from polyrhythm.errors import UserError

LOOK_DEADLINE_S = 120.0
DEVICE_FILES = ("nvidia[0-9]*", "davinci[0-9]*", "kfd", "dxg")
"""In /dev: those of NVIDIA, Ascend, AMD, and of GPUs inside WSL. Without any of them nobody needs to look."""
FIXES = {
    "cuda": "check that nvidia-smi lists a GPU and that torch is a build for CUDA (pip install torch)",
    "npu": "check that npu-smi info lists a device and that torch_npu is installed for this torch and CANN",
}


class Device(msgspec.Struct, frozen=True):
    name: str
    num_bytes: int
    """Of its memory, in all."""


class FoundDevices(msgspec.Struct, frozen=True):
    """Devices of one kind; none if the kind is cpu."""

    kind: str = "cpu"
    devices: list[Device] = []
    note: str = ""
    """What the user should know about the choice."""
    has_bfloat16: bool = False
    """Whether all of them compute in it."""


def find_devices(wanted: str) -> FoundDevices:
    """What `device=wanted` means on this machine; an accelerator that is asked for and not there is a UserError."""
    files = device_files()
    if wanted == "cpu" or (wanted == "auto" and not files):
        return FoundDevices()
    found = look_in_another_process()
    if wanted not in ("auto", found.kind):
        raise UserError(f"device={wanted!r}, but {found.note or f'torch finds {found.kind}'}: {FIXES[wanted]}")
    if found.kind == "cpu":
        return FoundDevices(note=f"{files[0]} is there, but {found.note}: running on the CPU; see polyrhythm doctor")
    return found


def device_files() -> list[str]:
    return sorted(str(path) for pattern in DEVICE_FILES for path in Path("/dev").glob(pattern))


@functools.cache
def look_in_another_process() -> FoundDevices:
    command = [sys.executable, "-m", "polyrhythm.devices.found"]
    try:
        said = subprocess.run(command, capture_output=True, timeout=LOOK_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return FoundDevices(note=f"asking torch for devices took longer than {LOOK_DEADLINE_S:.0f} s")
    try:
        return msgspec.json.decode(said.stdout.splitlines()[-1] if said.stdout else b"", type=FoundDevices)
    except msgspec.MsgspecError:
        last = (said.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {said.returncode}"])[-1]
        return FoundDevices(note=f"asking torch for devices failed: {last}")


def look() -> FoundDevices:
    """In a process of its own, see above."""
    import torch

    kind = find_accelerator()
    if kind is None:
        return FoundDevices(note=f"torch {torch.__version__} finds no device")
    module = torch.get_device_module(kind)
    devices = []
    for index in range(torch.accelerator.device_count()):
        num_bytes = torch.accelerator.get_memory_info(torch.device(kind, index))[1]
        devices.append(Device(str(module.get_device_name(index)), num_bytes))
    return FoundDevices(kind, devices, has_bfloat16=_has_bfloat16(kind))


def _has_bfloat16(kind: str) -> bool:
    import torch

    if kind == "cuda":  # older GPUs imitate it, slowly
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.get_device_module(kind).is_bf16_supported()


if __name__ == "__main__":
    print(msgspec.json.encode(look()).decode())
