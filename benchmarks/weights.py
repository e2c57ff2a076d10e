"""What new weights cost: publication, and a load by each kind of engine and each transport, as multiples of a memory copy of
the same bytes. JSON last.

A load is what an engine does between being told of a version and serving it: digests, the model, the repacked head, the cache's
reset, the proof. Both kinds of engine run beside each other in turns, nothing else meanwhile; the fastest round of each counts.
vLLM needs its environment (`polyrhythm setup vllm`); without it only the embedded engine is measured.
"""

import argparse
import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import measuring

from polyrhythm.environments import environment
from polyrhythm.weights.pretrained import resolve_model

CREDENTIAL = "benchmark"
DEADLINE_S = 300.0
SHARED_MEMORY = Path("/dev/shm")
Times = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="built-in name or folder (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of every side")
    parser.add_argument("--repeats", type=int, default=8, help="rounds; the fastest counts (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="five rounds")
    options = parser.parse_args()
    if options.short:
        options.repeats = 5
    measuring.run_as_a_trainer_does(options.threads)
    root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="polyrhythm-benchmark-", dir=root) as folder:
        print(json.dumps(asyncio.run(measure(options, Path(folder)))))


async def measure(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    from polyrhythm.training.policy.tri_model import load_policy
    from polyrhythm.weights.export import exported
    from polyrhythm.weights.proof import probe_of
    from polyrhythm.weights.store import WeightStore

    model_dir = resolve_model(options.model)
    policy, store = load_policy(model_dir), WeightStore(root, keep=2)
    num_bytes = sum(rows.rows.nbytes for rows in exported(policy))
    times: Times = {}
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(engines_of(options, model_dir, store))
        place = await stack.enter_async_context(meeting_place(store)) if "vllm" in engines else None
        for version in range(options.repeats):
            probe = probe_of(policy, version)
            await note(times, "copy", asyncio.to_thread(copy_once, num_bytes))
            await note(times, "publication", asyncio.to_thread(store.publish, exported(policy), version, probe))
            for name, engine in engines.items():
                await note(times, f"{name}_snapshot", engine.load(version))
            if place is not None:
                await note(times, "vllm_broadcast", place.load(engines["vllm"], version))
            print({name: round(seconds[-1], 3) for name, seconds in times.items()}, flush=True)
    return summary(times, num_bytes, options)


def summary(times: Times, num_bytes: int, options: argparse.Namespace) -> dict[str, Any]:
    # The first round makes the pages of the store, shows canaries and takes the memory of broadcasts.
    best = {name: min(seconds[2:]) for name, seconds in times.items()}
    ratios = {name: round(seconds / best["copy"], 1) for name, seconds in best.items() if name != "copy"}
    return {
        "over_a_copy": {"vllm_snapshot": None, "vllm_broadcast": None} | ratios,
        "seconds": {name: round(seconds, 3) for name, seconds in best.items()},
        "megabytes": round(num_bytes / 2**20),
        "threads": options.threads,
        "model": options.model,
        "rounds": options.repeats,
    }


async def note(times: Times, name: str, work: Awaitable[float | object]) -> None:
    started = time.perf_counter()
    said = await work
    seconds = time.perf_counter() - started
    times.setdefault(name, []).append(said if isinstance(said, float) else seconds)


_SPACE: list[Any] = []


def copy_once(num_bytes: int) -> float:
    """Seconds of a copy between pages that exist."""
    import torch

    if not _SPACE:
        _SPACE.extend(torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        _SPACE[0].copy_(_SPACE[1])
        best = min(best, time.perf_counter() - started)
    return best


@asynccontextmanager
async def engines_of(options: argparse.Namespace, model_dir: Path, store: Any) -> AsyncIterator[dict[str, Any]]:
    from polyrhythm.config import EngineConfig
    from polyrhythm.engine.kinds import ENGINE_KINDS

    configs = {"embedded": EngineConfig(threads=options.threads, max_batch=8, context_length=256)}
    if environment("vllm").is_made:
        of_vllm = {"enforce-eager": True, "kv-cache-memory-bytes": 2**27}
        configs["vllm"] = EngineConfig(
            kind="vllm", threads=options.threads, max_batch=8, context_length=256, options=of_vllm
        )
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(ENGINE_KINDS[name](model_dir, config, store))
            for name, config in configs.items()
        }


class Place:
    """Where a sender and an engine meet for a broadcast, as they do at the conductor of a run."""

    def __init__(self, url: str, rendezvous: Any, store: Any):
        self._url, self._rendezvous, self._store = url, rendezvous, store

    async def load(self, engine: Any, version: int) -> None:
        from polyrhythm.engine.kinds import Invitation
        from polyrhythm.messages import Meeting
        from polyrhythm.training.parallel.meeting import ConductorLine
        from polyrhythm.training.weight_sender import WeightSender

        number = self._rendezvous.epoch + 1
        self._rendezvous.begin(number)
        sender = WeightSender(ConductorLine(self._url, CREDENTIAL), lambda _: None, self._store)
        sending = threading.Thread(target=sender.send, args=[Meeting(version, number, 0, 2, DEADLINE_S)])
        sending.start()
        await engine.load(version, Invitation(self._url, CREDENTIAL, Meeting(version, number, 1, 2, DEADLINE_S)))
        await asyncio.to_thread(sending.join, DEADLINE_S)
        assert engine.status().has_received


@asynccontextmanager
async def meeting_place(store: Any) -> AsyncIterator[Place]:
    from aiohttp import web

    from polyrhythm.conductor.ranks.rendezvous import Rendezvous
    from polyrhythm.conductor.ranks.routes import meeting_at
    from polyrhythm.http.credentials import ADMIN, Credentials
    from polyrhythm.http.listener import Listener
    from polyrhythm.http.server import HttpServer

    rendezvous = Rendezvous()
    server = HttpServer(Credentials({ADMIN: CREDENTIAL}))
    server.add(ADMIN, [web.post("/weights/rendezvous", meeting_at(rendezvous))])
    async with Listener("127.0.0.1", 0) as listener, server.serving(listener) as url:
        yield Place(url, rendezvous, store)


if __name__ == "__main__":
    main()
