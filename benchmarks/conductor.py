"""What the conductor costs: CPU and memory per rollout as rollouts in flight and engines grow. No model.

    python benchmarks/conductor.py [--short]

Every row is one step: all groups are dispatched, all are in flight at once, then all are answered, scored, entered in the
ledger, written to the journal, and pulled and encoded as for the trainer. CPU is that of the conductor's process alone.

- `in process`: engines are objects behind the client interface, whose own cost is counted against the conductor.
- `http`: engines are HTTP servers in a process of their own; requests and answers cross the loopback.
- `rewards`: real worker processes where it says "workers", else an object that answers at once.
"""

import argparse
import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from polyrhythm import messages
from polyrhythm.conductor.conductor import Conductor
from polyrhythm.conductor.engines.client import HttpEngineClient
from polyrhythm.conductor.step_log import StepLog
from polyrhythm.conductor.steps.journal import Journal
from polyrhythm.config import Config
from polyrhythm.http.async_client import open_session
from polyrhythm.http.credentials import Credentials
from polyrhythm.messages import (
    Capabilities,
    EngineStatus,
    GenerateReply,
    GenerateRequest,
    JoinRequest,
    Published,
    Setup,
)
from polyrhythm.rewards.sandbox.frames import GroupScores, GroupToScore, RewardFunction, TrainingState, WorkerSetup
from polyrhythm.rewards.sandbox.pool import RewardPool
from polyrhythm.rollout import SingleTurn
from polyrhythm.types import Completion, Problem, Sampling

ROOT = Path(__file__).resolve().parents[1]
SETUP = Setup("1.2.3", "4.5.6", {})
GROUP_SIZE = 8
COMPLETION_TOKENS = 64
PROMPT_IDS = list(range(1000, 1200))
VOCAB_SIZE = 50_000
CREDENTIALS = Credentials({"generate": "g", "admin": "a"})
DEADLINE_S = 600.0


def constant_reward(completions: list[str]) -> list[float]:
    return [1.0 for _ in completions]


def answer(request: GenerateRequest) -> GenerateReply:
    completions = [
        Completion(
            token_ids=[1000 + (seed + place) % 40_000 for place in range(COMPLETION_TOKENS)],
            rollout_logprobs=[-(seed % 997 + place) / 1000 for place in range(COMPLETION_TOKENS)],
            finish_reason="length",
        )
        for seed in request.seeds
    ]
    return GenerateReply(request.request_id, request.policy_version, completions)


class ScriptedEngine:
    """Holds every answer until the gate opens, so that all rollouts are in flight at once."""

    def __init__(self, gate: asyncio.Event):
        self._gate = gate
        self._version = -1

    async def generate(self, request: GenerateRequest, deadline_s: float) -> GenerateReply:
        async with asyncio.timeout(deadline_s):
            await self._gate.wait()
        return answer(request)

    async def load(self, version: int, deadline_s: float, meeting: object = None) -> None:
        self._version = version

    async def status(self, deadline_s: float) -> EngineStatus:
        return EngineStatus(self._version, 0, 0, 0, 0.0, 1)


class Problems:
    def take(self, cursor: int, n: int) -> list[Problem]:
        return [Problem(index, "a prompt", {"answer": index}) for index in range(cursor, cursor + n)]


class Text:
    def encode(self, problem: Problem) -> list[int]:
        return PROMPT_IDS

    def decode(self, token_ids: Any) -> str:
        return "an answer"


class InstantScorer:
    async def score(self, group: GroupToScore, state: TrainingState) -> GroupScores:
        return GroupScores([1.0] * len(group.completions))


class NoLogger:
    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def log_samples(self, step: int, samples: Any) -> None: ...

    def close(self) -> None: ...


def make_conductor(num_rollouts: int, num_engines: int, folder: Path, scorer: Any, connect: Any) -> Conductor:
    num_groups = num_rollouts // GROUP_SIZE
    groups_per_engine = -(-num_groups // num_engines)
    config = Config.model_validate(
        {
            "rollout": {"group_size": GROUP_SIZE, "groups_per_step": num_groups, "max_tokens": COMPLETION_TOKENS},
            "cluster": {"num_engines": num_engines},
            "engine": {"max_batch": GROUP_SIZE * groups_per_engine},
            "conductor": {"request_deadline_s": DEADLINE_S, "lease_s": DEADLINE_S},
        }
    )
    sampling = Sampling(max_tokens=COMPLETION_TOKENS, stop=("\n",), stop_token_ids=(2,))
    rollouter, journal = SingleTurn(Text(), sampling), Journal(folder / "journal")
    step_log = StepLog(NoLogger(), journal, rollouter.text, config.observe.samples_per_step)
    return Conductor(config, Problems(), rollouter, VOCAB_SIZE, scorer, step_log, journal, connect, SETUP)


async def run_step(conductor: Conductor, num_engines: int, urls: list[str], open_gate: Any) -> dict[str, float]:
    """One step from its opening to its commit; CPU, seconds and memory per rollout."""
    num_groups = conductor.config.rollout.groups_per_step
    num_rollouts = num_groups * GROUP_SIZE
    for index in range(num_engines):
        conductor.join(
            JoinRequest(
                f"engine-{index}",
                urls[index % len(urls)] + f"?{index}",
                Capabilities(conductor.config.engine.max_batch, True, True, False),
                SETUP,
            )
        )
    memory_before = resident_bytes()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    conductor.published(Published(0, {}))
    await conductor.wait_for_engines(0)
    assert conductor.step is not None
    while conductor.step.num_dispatched < num_groups:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    memory_in_flight = resident_bytes()
    await open_gate()
    num_taken = 0
    while num_taken < num_groups:
        reply = await conductor.groups(0, num_taken, num_groups, 20.0)
        messages.encode(reply)
        num_taken += len(reply.groups)
    conductor.published(Published(1, {}))
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return {
        "cpu_ms_per_rollout": 1000 * cpu_s / num_rollouts,
        "groups_per_s": num_groups / wall_s,
        "bytes_per_rollout_in_flight": (memory_in_flight - memory_before) / num_rollouts,
        "bytes_per_rollout_finished": (resident_bytes() - memory_before) / num_rollouts,
    }


async def measure(num_rollouts: int, num_engines: int, over_http: bool, with_workers: bool) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scorer: Any = InstantScorer()
        if with_workers:
            setup = WorkerSetup([RewardFunction("benchmarks.conductor:constant_reward", "constant_reward")])
            scorer = await stack.enter_async_context(RewardPool(setup, 1, 60.0))
        gate = asyncio.Event()
        connect: Any = lambda url: ScriptedEngine(gate)  # noqa: E731
        urls = ["http://in-process"]

        async def open_gate() -> None:
            gate.set()

        if over_http:
            session = await stack.enter_async_context(open_session())
            servers = stack.enter_context(engine_servers(num_engines))
            urls = servers.urls

            def connect(url: str) -> HttpEngineClient:
                return HttpEngineClient(session, url.partition("?")[0], CREDENTIALS)

            async def open_gate() -> None:
                servers.open_gate()

        conductor = make_conductor(num_rollouts, num_engines, folder, scorer, connect)
        run = asyncio.create_task(conductor.run())
        stack.callback(run.cancel)
        await asyncio.sleep(0)
        figures = await run_step(conductor, num_engines, urls, open_gate)
    return {
        "engines_are": "http" if over_http else "in process",
        "rewards": "workers" if with_workers else "instant",
        "num_engines": num_engines,
        "num_rollouts_in_flight": num_rollouts // GROUP_SIZE * GROUP_SIZE,
        **{name: round(value, 4) for name, value in figures.items()},
    }


class Servers:
    def __init__(self, process: subprocess.Popen[str]):
        assert process.stdout is not None and process.stdin is not None
        self._stdin = process.stdin
        self.urls: list[str] = json.loads(process.stdout.readline())

    def open_gate(self) -> None:
        self._stdin.write("open\n")
        self._stdin.flush()


@contextlib.contextmanager
def engine_servers(num_engines: int) -> Any:
    command = [sys.executable, "-m", "benchmarks.conductor", "--serve-engines", str(num_engines)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Servers(process)
        finally:
            process.kill()


async def serve_engines(num_engines: int) -> None:
    """Engines on ports of their own; the gate opens at the first line on stdin, the process ends with it."""
    gate, urls = asyncio.Event(), []
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), gate.set)
    for _ in range(num_engines):
        runner = web.AppRunner(make_app(ScriptedEngine(gate)), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    print(json.dumps(urls), flush=True)
    await asyncio.sleep(DEADLINE_S)


def make_app(engine: ScriptedEngine) -> web.Application:
    async def generate(request: web.Request) -> web.Response:
        message = messages.decode(await request.read(), GenerateRequest)
        return web.Response(body=messages.encode(await engine.generate(message, DEADLINE_S)))

    async def load(request: web.Request) -> web.Response:
        await engine.load(messages.decode(await request.read(), messages.LoadRequest).version, DEADLINE_S)
        return web.Response()

    async def status(_: web.Request) -> web.Response:
        return web.Response(body=messages.encode(await engine.status(DEADLINE_S)))

    app = web.Application(client_max_size=messages.MAX_BODY_BYTES)
    app.add_routes([web.post("/generate", generate), web.post("/weights/load", load), web.get("/status", status)])
    return app


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure_in_fresh_process(
    num_rollouts: int, num_engines: int, over_http: bool, with_workers: bool
) -> dict[str, Any]:
    """Memory figures mean something only in a process that has done nothing else."""
    row = json.dumps([num_rollouts, num_engines, over_http, with_workers])
    command = [sys.executable, "-m", "benchmarks.conductor", "--row", row]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE_S)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer and smaller rows")
    parser.add_argument("--serve-engines", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.serve_engines:
        asyncio.run(serve_engines(parsed.serve_engines))
        return
    if parsed.row:
        print(json.dumps(asyncio.run(measure(*json.loads(parsed.row)))))
        return
    rows = [(800, 1, False, False), (8_000, 10, False, False), (100_000, 1_000, False, False), (2_000, 8, True, True)]
    if not parsed.short:
        rows += [(100_000, 10, False, False), (100_000, 1_000, False, True), (8_000, 64, True, True)]
    results = []
    for row in rows:
        result = measure_in_fresh_process(*row)
        results.append(result)
        print(
            f"{result['num_rollouts_in_flight']:>7} rollouts, {result['num_engines']:>4} engines {result['engines_are']}, "
            f"rewards {result['rewards']}: {result['cpu_ms_per_rollout']:.3f} ms CPU per rollout, "
            f"{result['groups_per_s']:.0f} groups/s, {result['bytes_per_rollout_in_flight'] / 1024:.1f} KiB in flight, "
            f"{result['bytes_per_rollout_finished'] / 1024:.1f} KiB finished",
            flush=True,
        )
    most = max(results, key=lambda r: (r["num_rollouts_in_flight"], r["num_engines"], r["rewards"] == "workers"))
    summary = {key: most[key] for key in most if key not in ("engines_are", "rewards")}
    print(json.dumps({**summary, "rows": results}))


if __name__ == "__main__":
    main()
