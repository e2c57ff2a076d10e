"""The torch that is installed and the devices it finds, and what of a model would be where."""

import os
from collections.abc import Iterator
from pathlib import Path

from polyrhythm.config import Config
from polyrhythm.devices.found import FIXES, FoundDevices, device_files, look_in_another_process
from polyrhythm.devices.memory import gigabytes
from polyrhythm.devices.plan import VISIBLE_VARIABLES, describe_plan, plan_devices
from polyrhythm.doctor.findings import Finding
from polyrhythm.errors import UserError


def check_torch() -> Iterator[Finding]:
    import torch
    import transformers

    build = torch.version.cuda and f"built for CUDA {torch.version.cuda}"
    build = build or (torch.version.hip and f"built for ROCm {torch.version.hip}") or "built for the CPU"
    yield Finding(
        "torch", "ok", f"{torch.__version__}, {build}; transformers {transformers.__version__}",
        numbers={"torch": str(torch.__version__), "cuda": torch.version.cuda, "transformers": transformers.__version__},
    )  # fmt: skip


def check_devices() -> Iterator[Finding]:
    found, files = look_in_another_process(), device_files()
    chosen = {name: os.environ[name] for name in VISIBLE_VARIABLES.values() if name in os.environ}
    hidden = f" ({', '.join(f'{name}={value}' for name, value in chosen.items())})" if chosen else ""
    if found.kind != "cpu":
        cards = ", ".join(f"{device.name} with {gigabytes(device.num_bytes)} GB" for device in found.devices)
        yield Finding(
            "devices", "ok", f"{len(found.devices)} of kind {found.kind}: {cards}{hidden}", numbers=_numbers(found)
        )
    elif files:
        kind = "npu" if "davinci" in files[0] else "cuda"
        yield Finding("devices", "problem", f"{', '.join(files)} are there, but {found.note}{hidden}", FIXES[kind])
    else:
        yield Finding("devices", "ok", f"no accelerator, runs use the CPU: {found.note}{hidden}")


def check_memory(config: Config, model_dir: Path | None) -> Iterator[Finding]:
    if model_dir is None:
        fix = f"polyrhythm fetch {config.model}"
        yield Finding("memory plan", "warning", f"model {config.model!r} is not on this machine yet", fix)
        return
    try:
        for line in describe_plan(plan_devices(config), config, model_dir):
            yield Finding("memory plan", "ok", line.strip())
    except UserError as error:
        why, *lines = str(error).splitlines()
        text, _, fix = why.partition(": ")
        yield Finding("memory plan", "problem", "; ".join([text, *(line.strip() for line in lines)]), fix)


def _numbers(found: FoundDevices) -> dict[str, object]:
    return {"kind": found.kind, "devices": [[device.name, device.num_bytes] for device in found.devices]}
