"""What a device computes: attention and log-probabilities per number format, and how fast numbers get there and back."""

import time
from collections.abc import Callable, Iterator

import torch

from polyrhythm.doctor.findings import Finding
from polyrhythm.training.packing.attention import cpu_attention
from polyrhythm.training.packing.device_attention import kernel_of_device
from polyrhythm.training.packing.logprobs import token_logprobs
from polyrhythm.training.packing.reference_attention import disagreement, looped_attention

NUMBER_FORMATS = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIM, REPEATS = 64, 4
NUM_ROWS, HIDDEN, VOCABULARY = 64, 512, 8192
WIDE_ERROR = 0.01
"""Of a log-probability, in nats: a ratio of probabilities is then off by a hundredth."""
COPY_BYTES = 128 * 2**20
NUM_COPIES = 5


def check_attention(device: torch.device) -> Iterator[Finding]:
    """Each number format by the kernel that a run would use, forward and backward against double precision."""
    for dtype in NUMBER_FORMATS:
        about, name = "attention", str(dtype).removeprefix("torch.")
        own = cpu_attention if device.type == "cpu" else kernel_of_device(device, dtype)
        reasons: list[str] = []
        for kernel in filter(None, (own, looped_attention)):
            why_not = disagreement(kernel, device=device, dtype=dtype, head_dim=HEAD_DIM, repeats=REPEATS)
            if why_not is None:
                break
            reasons.append(f"{kernel.__name__}: {why_not}")
        else:
            fix = f"do not train in {name} on this device; report this"
            yield Finding(about, "problem", f"{name} on {device} fails its self-test ({'; '.join(reasons)})", fix)
            continue
        text = f"{name} on {device}: {kernel.__name__} agrees with the loop in double precision, forward and backward"
        fix = "report the failed check; runs use the loop meanwhile, which is slower" if reasons else ""
        yield Finding(about, "warning" if reasons else "ok", "; ".join([text, *reasons]), fix)


def check_logprobs(device: torch.device) -> Iterator[Finding]:
    """Log-probabilities from rounded numbers, against double precision of the same rounded numbers."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_ROWS, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator) * (3 / HIDDEN**0.5)
    target = torch.randint(VOCABULARY, (NUM_ROWS,), generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        logits = hidden.double() @ weight.double().T
        expected = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
        with torch.no_grad():
            computed, _ = token_logprobs(hidden.to(device), weight.to(device), target.to(device))
        errors = (computed.cpu().double() - expected).abs()
        name, numbers = str(dtype).removeprefix("torch."), {"max": errors.max().item(), "mean": errors.mean().item()}
        text = f"{name} on {device}: off by {numbers['max']:.1g} at most, {numbers['mean']:.1g} in the mean"
        if numbers["max"] <= WIDE_ERROR:
            yield Finding("log-probs", "ok", text, numbers=numbers)
        else:
            fix = f"train in float32 until this is below {WIDE_ERROR}: ratios of probabilities are off by as much"
            yield Finding("log-probs", "warning", text, fix, numbers)


def check_copies(device: torch.device) -> Iterator[Finding]:
    here = torch.ones(COPY_BYTES, dtype=torch.uint8)
    if device.type == "cpu":
        there = here.clone()
        speed = _speed(lambda: there.copy_(here), device)
        yield Finding("copies", "ok", f"memory to memory {speed:.1f} GB/s", numbers={"memory": speed})
        return
    there, pinned = here.to(device), here.pin_memory()
    speeds = {
        "up": _speed(lambda: there.copy_(here), device),
        "up_pinned": _speed(lambda: there.copy_(pinned), device),
        "down": _speed(lambda: here.copy_(there), device),
        "down_pinned": _speed(lambda: pinned.copy_(there), device),
    }
    yield Finding(
        "copies", "ok", ", ".join(f"{name} {speed:.1f} GB/s" for name, speed in speeds.items()), numbers=speeds
    )


def _speed(copy: Callable[[], object], device: torch.device) -> float:
    """The fastest of some, in GB/s."""
    seconds = []
    for _ in range(NUM_COPIES):
        started = time.perf_counter()
        copy()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    return COPY_BYTES / min(seconds) / 1e9
