"""A scripted engine behind real HTTP, and a conductor around fakes of everything else."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polyrhythm import messages
from polyrhythm.conductor.conductor import Conductor
from polyrhythm.conductor.engines.client import HttpEngineClient
from polyrhythm.conductor.engines.health import Limits
from polyrhythm.conductor.service import Service, sampling_of
from polyrhythm.conductor.step_log import StepLog
from polyrhythm.conductor.steps.journal import Journal
from polyrhythm.config import Config
from polyrhythm.http.async_client import open_session
from polyrhythm.http.credentials import Credentials
from polyrhythm.messages import EngineStatus, GenerateReply, GenerateRequest, LoadRequest
from polyrhythm.observe.metrics import is_known
from polyrhythm.observe.status import RunStatus
from polyrhythm.rewards.sandbox.frames import GroupScores, GroupToScore, RewardFailure, TrainingState
from polyrhythm.rollout import SingleTurn
from polyrhythm.types import Completion, Group, Problem, Trace, rollout_seed

VOCAB_SIZE = 1000
SETUP = messages.Setup("1.2.3", "4.5.6", {"config.json": "c0ffee", "tokenizer.json": "7ea"})
CREDENTIALS = Credentials({"generate": "generate-token", "admin": "admin-token"})


class ScriptedEngine:
    """Answers like an engine, as told: set `answer` and `load` to misbehave, `hold` a position to keep it waiting."""

    def __init__(self, name: str, events: list[tuple]):
        self.name = name
        self.events = events
        self.policy_version = -1
        self.url = ""
        self.server: TestServer
        self.num_running = 0
        self.requests: list[GenerateRequest] = []
        self.held: dict[str, asyncio.Event] = {}
        self.answer: Callable[[GenerateRequest, GenerateReply], Any] = lambda request, reply: reply
        self.load: Callable[[int], int | web.Response] = lambda version: version
        self.status_fails = False

    def hold(self, group: str) -> asyncio.Event:
        """Requests for "<version>/<position>" are answered only after the event is set."""
        return self.held.setdefault(group, asyncio.Event())

    def release_all(self) -> None:
        for event in self.held.values():
            event.set()

    def application(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/weights/load", self._load),
                web.get("/status", self._status),
            ]
        )
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == f"Bearer {CREDENTIALS['generate']}"
        message = messages.decode(await request.read(), GenerateRequest)
        # Which group it is about, whatever the attempt: "<version>/<position>".
        group = "/".join(message.request_id.split("/")[:2])
        self.events.append(("generate", self.name, group))
        self.requests.append(message)
        if message.policy_version != self.policy_version:
            return web.Response(status=409, text=f"this engine holds version {self.policy_version}")
        self.num_running += len(message.seeds)
        try:
            if group in self.held:
                await self.held[group].wait()
            reply = self.answer(message, reply_to(message))
            if isinstance(reply, Exception):
                assert request.transport is not None
                request.transport.abort()
                raise reply
            if isinstance(reply, web.StreamResponse):
                return reply
        finally:
            self.num_running -= len(message.seeds)
        self.events.append(("answer", self.name, group))
        return web.Response(body=messages.encode(reply), content_type=messages.CONTENT_TYPE)

    async def _load(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == f"Bearer {CREDENTIALS['admin']}"
        version = messages.decode(await request.read(), LoadRequest).version
        self.events.append(("load", self.name, version))
        outcome = self.load(version)
        if isinstance(outcome, web.StreamResponse):
            return outcome
        self.policy_version = outcome
        return web.Response(body=b"")

    async def _status(self, _: web.Request) -> web.StreamResponse:
        if self.status_fails:
            return web.Response(status=500, text="told to fail")
        status = EngineStatus(self.policy_version, self.num_running, 0, 0, 0.0, 1)
        return web.Response(body=messages.encode(status), content_type=messages.CONTENT_TYPE)


def reply_to(request: GenerateRequest) -> GenerateReply:
    """A completion is a function of its seed, as the real engine's is."""
    completions = [
        Completion(token_ids=[seed % VOCAB_SIZE, 1], rollout_logprobs=[-0.5, -0.25], finish_reason="stop")
        for seed in request.seeds
    ]
    return GenerateReply(request.request_id, request.policy_version, completions)


class NumberedProblems:
    def take(self, cursor: int, n: int) -> list[Problem]:
        return [Problem(index, f"problem {index}", {"answer": index}) for index in range(cursor, cursor + n)]


class WordlessText:
    """Prompts of three tokens; completions read as their ids."""

    def encode(self, problem: Problem) -> list[int]:
        return [3, 4, int(str(problem.prompt).split()[-1]) % VOCAB_SIZE]

    def decode(self, token_ids) -> str:
        return " ".join(map(str, token_ids))


@dataclass
class ScriptedScorer:
    """Rewards odd completions, unless told otherwise; set `amend` to add to the scores of a group."""

    reward: Callable[[dict[str, Any], list[int]], float | RewardFailure | None] = lambda columns, ids: float(ids[0] % 2)
    amend: Callable[[GroupScores], GroupScores] = lambda scores: scores
    states: list[TrainingState] = field(default_factory=list)

    async def score(self, group: GroupToScore, state: TrainingState) -> GroupScores:
        self.states.append(state)
        values = [self.reward(group.columns, ids) for ids in group.completion_ids]
        rewards = [None if isinstance(value, RewardFailure) else value for value in values]
        failures = {index: value for index, value in enumerate(values) if isinstance(value, RewardFailure)}
        return self.amend(GroupScores(rewards, {"scripted": rewards}, failures))


@dataclass
class RecordingLogger:
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        assert not (unknown := [name for name in metrics if not is_known(name)]), f"observe/metrics.py lacks {unknown}"
        self.rows.append((step, metrics))

    def log_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        self.samples += samples

    def close(self) -> None: ...


class Stage:
    """A running conductor with its HTTP service, and scripted engines around it."""

    def __init__(self, conductor: Conductor, logger: RecordingLogger, scorer: ScriptedScorer):
        self.conductor = conductor
        self.logger = logger
        self.scorer = scorer
        self.events: list[tuple] = []
        self.engines: list[ScriptedEngine] = []
        self.run: asyncio.Task[None]
        self.url = ""
        self._stack = contextlib.AsyncExitStack()
        self._session: aiohttp.ClientSession

    async def call(
        self, method: str, path: str, message: Any = None, token: str = CREDENTIALS["admin"]
    ) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": messages.CONTENT_TYPE}
        body = None if message is None else messages.encode(message)
        async with self._session.request(method, self.url + path, data=body, headers=headers) as response:
            return response.status, await response.read()

    async def open(self, version: int) -> tuple[int, bytes]:
        """Weights are published, for the first time or again; answers when engines hold them."""
        status, body = await self.published(version)
        return await self.call("GET", f"/steps/{version}/ready") if status == 200 else (status, body)

    async def groups(
        self, version: int, offset: int, wait_s: float = 10.0, rank: int = 0, until: int = 1000
    ) -> messages.GroupsReply:
        query = f"offset={offset}&until={until}&rank={rank}&wait_s={wait_s}"
        status, body = await self.call("GET", f"/steps/{version}/groups?{query}")
        assert status == 200, body
        return messages.decode(body, messages.GroupsReply)

    async def all_groups(self, version: int) -> list:
        groups = []
        async with asyncio.timeout(10):
            while len(groups) < self.conductor.config.rollout.groups_per_step:
                groups += (await self.groups(version, len(groups))).groups
        return groups

    async def commit(self, version: int, **metrics: float) -> tuple[int, bytes]:
        return await self.published(version + 1, **metrics)

    async def published(self, version: int, **metrics: float) -> tuple[int, bytes]:
        return await self.call("POST", "/weights/published", messages.Published(version, metrics))

    async def status(self) -> RunStatus:
        status, body = await self.call("GET", "/status")
        assert status == 200
        return msgspec.json.decode(body, type=RunStatus)

    async def add_engine(self, name: str | None = None, join: bool = True) -> ScriptedEngine:
        engine = ScriptedEngine(name or f"engine-{len(self.engines)}", self.events)
        engine.server = server = TestServer(engine.application())
        await server.start_server()
        self._stack.push_async_callback(server.close)
        self._stack.callback(engine.release_all)
        engine.url = str(server.make_url("")).rstrip("/")
        self.engines.append(engine)
        if join:
            status, body = await self.call("POST", "/engines/join", self.joining(engine.name, engine.url))
            assert status == 200, body
        return engine

    def joining(self, name: str, url: str, **capabilities: Any) -> messages.JoinRequest:
        """What an engine says that is as capable as the configured one, unless told otherwise."""
        usual = dict(
            max_completions=self.conductor.config.engine.max_batch,
            adjustable_threads=True,
            reads_store=True,
            openai_routes=False,
        )
        return messages.JoinRequest(name, url, messages.Capabilities(**(usual | capabilities)), SETUP)

    async def heartbeat(self, engine: ScriptedEngine) -> tuple[int, bytes]:
        return await self.call("POST", "/engines/heartbeat", self.joining(engine.name, engine.url))

    async def until(self, condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def engine_state(self, name: str) -> str:
        engine = self.conductor.pool.get(name)
        assert engine is not None
        return engine.health.state

    async def __aenter__(self) -> "Stage":
        self._session = await self._stack.enter_async_context(open_session())
        server = TestServer(Service(self.conductor, CREDENTIALS["admin"]).server.app)
        await server.start_server()
        self._stack.push_async_callback(server.close)
        self.url = str(server.make_url("")).rstrip("/")
        self.run = asyncio.create_task(self.conductor.run())
        self._stack.push_async_callback(self._end_run)
        await asyncio.sleep(0)
        return self

    async def _end_run(self) -> None:
        self.run.cancel()
        await asyncio.wait([self.run], timeout=5)

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()


def assert_undisturbed(stage: Stage, groups: list[Group]) -> None:
    """Every group is there once, with the completions that its seeds give, whoever generated them."""
    assert sorted(group.position for group in groups) == list(range(stage.conductor.config.rollout.groups_per_step))
    for group in groups:
        assert group.problem_index == group.position
        assert [rollout.index for rollout in group.rollouts] == [0, 1]
        for rollout in group.rollouts:
            seed = rollout_seed(0, 0, group.problem_index, rollout.index)
            assert rollout.trace == Trace.of(Completion([seed % 1000, 1], [-0.5, -0.25], "stop"))
            assert rollout.policy_version == 0


@pytest.fixture
async def make_stage(monkeypatch, tmp_path) -> AsyncIterator[Callable]:
    """`stage = await make_stage(num_engines=2, order="problem", rollout={...})`."""
    hasty = functools.partial(Limits, suspect_pause_s=0.05, load_pause_s=0.05)
    monkeypatch.setattr("polyrhythm.conductor.conductor.Limits", hasty)
    monkeypatch.setattr("polyrhythm.conductor.conductor.LINGER_S", 0.05)
    monkeypatch.setattr("polyrhythm.conductor.engines.monitor.PROBE_INTERVAL_S", 0.05)
    async with contextlib.AsyncExitStack() as stack:

        async def make(
            num_engines: int = 1, correct_above: float | None = None, num_problems: int | None = None, **changes: Any
        ) -> Stage:
            session = await stack.enter_async_context(open_session())
            values: dict[str, Any] = {
                "rollout": {"group_size": 2, "groups_per_step": 4},
                "cluster": {"num_engines": max(1, num_engines)},
                "engine": {"max_batch": 2, "start_deadline_s": 5},
                "conductor": {"request_deadline_s": 5},
                "weights": {"load_deadline_s": 5},
            }
            for key, value in changes.items():
                values[key] = {**values[key], **value} if isinstance(value, dict) and key in values else value
            config = Config.model_validate(values)
            logger, scorer = RecordingLogger(), ScriptedScorer()
            rollouter = SingleTurn(WordlessText(), sampling_of(config, ("\n",), (2,)))
            journal = Journal(tmp_path / "journal")
            conductor = Conductor(
                config,
                problems=NumberedProblems(),
                rollouter=rollouter,
                vocab_size=VOCAB_SIZE,
                scorer=scorer,
                step_log=StepLog(
                    logger,
                    journal,
                    rollouter.text,
                    config.observe.samples_per_step,
                    num_problems=num_problems,
                    correct_above=correct_above,
                ),
                journal=journal,
                connect=lambda url: HttpEngineClient(session, url, CREDENTIALS),
                setup=SETUP,
            )
            stage = await stack.enter_async_context(Stage(conductor, logger, scorer))
            for _ in range(num_engines):
                await stage.add_engine()
            return stage

        yield make
