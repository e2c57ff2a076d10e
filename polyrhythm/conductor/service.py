"""The conductor's HTTP service: msgpack bodies of `messages`, the credential of "admin" for every route but /health."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from aiohttp import web

from polyrhythm.conductor.conductor import Conductor
from polyrhythm.conductor.engines.client import HttpEngineClient
from polyrhythm.conductor.engines.cores import CorePlan
from polyrhythm.conductor.ranks.elastic_routes import ElasticRoutes
from polyrhythm.conductor.ranks.routes import RankRoutes, meeting_at
from polyrhythm.conductor.status import engine_view, run_status
from polyrhythm.conductor.step_log import StepLog
from polyrhythm.conductor.steps.assignment import Rank
from polyrhythm.conductor.steps.journal import Journal
from polyrhythm.config import Config
from polyrhythm.devices.memory import snapshot_bytes
from polyrhythm.http.async_client import open_session
from polyrhythm.http.credentials import ADMIN, Credentials
from polyrhythm.http.errors import Refusal
from polyrhythm.http.listener import Listener
from polyrhythm.http.server import PUBLIC, HttpServer, as_json, packed, read_message
from polyrhythm.messages import EngineName, JoinRequest, Published, RunInfo, ThreadsRequest
from polyrhythm.observe.activity import ActivityReport
from polyrhythm.observe.loggers.logger import DEFAULT_PROJECT, LoggedRun
from polyrhythm.observe.status import Curves
from polyrhythm.rewards.functions import worker_setup
from polyrhythm.rewards.sandbox.pool import RewardPool
from polyrhythm.rollout import ROLLOUTERS
from polyrhythm.setups import setup_of
from polyrhythm.types import Sampling
from polyrhythm.weights.server import WeightServer

MAX_WAIT_S = 60.0
ALL_GROUPS = 2**31 - 1
SHUTDOWN_DEADLINE_S = 1.0


class Service:
    """The routes. Each decodes a message, asks the conductor, and encodes the answer."""

    def __init__(
        self,
        conductor: Conductor,
        admin_credential: str,
        info: RunInfo | None = None,
        more_routes: Sequence[web.RouteDef] = (),
    ):
        self._conductor = conductor
        self._info = info
        self.server = HttpServer(Credentials({ADMIN: admin_credential}), shutdown_deadline_s=SHUTDOWN_DEADLINE_S)
        self.server.add(PUBLIC, [web.get("/health", self._health)])
        self.server.add(ADMIN, [*self._routes(), *more_routes])

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.get("/status", self._status),
            web.get("/run", self._run),
            web.get("/engines", self._engines),
            web.post("/engines/join", self._join),
            web.post("/engines/heartbeat", self._heartbeat),
            web.post("/engines/drain", self._drain),
            web.post("/engines/remove", self._remove),
            web.post("/weights/published", self._published),
            web.get("/weights/broadcast", self._broadcast),
            web.post("/weights/rendezvous", meeting_at(self._conductor.broadcasts.rendezvous)),
            web.get(r"/steps/{version:\d{1,9}}/ready", self._ready),
            web.get(r"/steps/{version:\d{1,9}}/groups", self._groups),
            web.post("/trainer/report", self._report),
            web.get("/trainer/threads", self._trainer_threads),
            *RankRoutes(self._conductor.membership, self._conductor.rendezvous, self._conductor.setup).routes(),
            *ElasticRoutes(self._conductor.elastic).routes(),
        ]

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _status(self, _: web.Request) -> web.Response:
        return as_json(run_status(self._conductor))

    async def _run(self, _: web.Request) -> web.Response:
        if self._info is None:
            raise web.HTTPNotFound(text="this run cannot be joined from elsewhere")
        return packed(self._info)

    async def _join(self, request: web.Request) -> web.Response:
        self._conductor.join(await read_message(request, JoinRequest))
        return packed({})

    async def _engines(self, _: web.Request) -> web.Response:
        return as_json([engine_view(engine) for engine in self._conductor.pool.engines])

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self._conductor.heartbeat(await read_message(request, JoinRequest))
        return packed({})

    async def _drain(self, request: web.Request) -> web.Response:
        self._conductor.drain((await read_message(request, EngineName)).name)
        return packed({})

    async def _remove(self, request: web.Request) -> web.Response:
        self._conductor.remove((await read_message(request, EngineName)).name)
        return packed({})

    async def _published(self, request: web.Request) -> web.Response:
        self._conductor.published(await read_message(request, Published))
        return packed({})

    async def _broadcast(self, request: web.Request) -> web.Response:
        after, wait_s = int(_number(request, "after")), min(_number(request, "wait_s"), MAX_WAIT_S)
        return packed(await self._conductor.broadcasts.next_for_sender(after, wait_s))

    async def _ready(self, request: web.Request) -> web.Response:
        await self._conductor.wait_for_engines(int(request.match_info["version"]), self._rank(request))
        return packed({})

    async def _groups(self, request: web.Request) -> web.Response:
        version, wait_s = int(request.match_info["version"]), min(_number(request, "wait_s"), MAX_WAIT_S)
        offset, rank = int(_number(request, "offset")), self._rank(request)
        until = int(_number(request, "until", default=ALL_GROUPS))
        return packed(await self._conductor.groups(version, offset, until, wait_s, rank))

    def _rank(self, request: web.Request) -> Rank:
        """Elastic ranks are known by the name of their process, others by their number."""
        return request.query.get("rank", "") if self._conductor.elastic else int(_number(request, "rank"))

    async def _trainer_threads(self, request: web.Request) -> web.Response:
        known, wait_s = int(_number(request, "known")), min(_number(request, "wait_s"), MAX_WAIT_S)
        return packed(ThreadsRequest(num_threads=await self._conductor.trainer_threads(known, wait_s)))

    async def _report(self, request: web.Request) -> web.Response:
        self._conductor.report(await read_message(request, ActivityReport))
        return packed({})


def _number(request: web.Request, name: str, default: float = 0) -> float:
    try:
        value = float(request.query.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 <= value < 2**31:
        raise Refusal(f"{name} must be a number from 0 on")
    return value


async def run_conductor(
    config: Config,
    run_dir: Path,
    model_dir: Path,
    store_root: Path,
    credentials: Credentials,
    port: int,
    ready: Callable[[str], None],
    first_step: int = 0,
    has_optimizer: bool = False,
    cores: CorePlan | None = None,
    make_rewards: Callable[..., RewardPool] = RewardPool,
) -> None:
    """Serve until cancelled; RunError when the run cannot go on. `ready` is told the URL that listens."""
    from polyrhythm.observe.loggers import Loggers, find_loggers
    from polyrhythm.observe.loggers.jsonl import read_metrics
    from polyrhythm.tasks import PromptText, make_task, open_problems
    from polyrhythm.tokenizer import Tokenizer

    # The address first: one that is taken is told before anything is loaded.
    listener = Listener(config.conductor.host, port, keys="conductor.host, conductor.port")
    async with listener, open_session() as session:
        task = make_task(config.task, config.prompt)
        tokenizer = Tokenizer(model_dir)
        text = PromptText(tokenizer, config)
        problems = open_problems(config, task, text).stream
        rewards = make_rewards(
            worker_setup(config.reward, task.reward), config.reward.num_workers, config.reward.deadline_s
        )
        with Loggers(_logged_run(config, run_dir, first_step), find_loggers(config.observe.loggers)) as logger:
            async with rewards:
                journal = Journal(run_dir / "journal")
                rollouter = ROLLOUTERS["single_turn"](text, sampling_of(config, task.stop, tokenizer.eos_token_ids))
                step_log = StepLog(
                    logger,
                    journal,
                    rollouter.text,
                    config.observe.samples_per_step,
                    num_problems=problems.num_problems,
                    correct_above=None if task.reward and config.reward.functions else task.correct_above,
                    curves=Curves(read_metrics(run_dir)),
                    notes=logger.warnings,
                )
                conductor = Conductor(
                    config,
                    problems=problems,
                    rollouter=rollouter,
                    vocab_size=tokenizer.vocab_size,
                    scorer=rewards,
                    step_log=step_log,
                    journal=journal,
                    connect=lambda url: HttpEngineClient(session, url, credentials),
                    setup=setup_of(model_dir),
                    cores=cores,
                    first_step=first_step,
                    snapshot_bytes=snapshot_bytes(config, model_dir),
                )
                weights = WeightServer(store_root, config.weights.load_deadline_s)
                info = _run_info(config, run_dir, model_dir, store_root, first_step, has_optimizer)
                service = Service(conductor, credentials["admin"], info, weights.routes())
                await serve(conductor, service.server, listener, ready)


def _logged_run(config: Config, run_dir: Path, first_step: int) -> LoggedRun:
    return LoggedRun(
        folder=run_dir,
        project=config.observe.project or DEFAULT_PROJECT,
        name=config.observe.run_name or run_dir.name,
        config=config.model_dump(),
        num_finished_steps=first_step,
    )


def _run_info(
    config: Config, run_dir: Path, model_dir: Path, store_root: Path, first_step: int, has_optimizer: bool
) -> RunInfo:
    return RunInfo(
        run_dir=str(run_dir),
        model_dir=str(model_dir),
        store_root=str(store_root),
        setup=setup_of(model_dir),
        config=config.model_dump(),
        first_step=first_step,
        has_optimizer=has_optimizer,
    )


async def serve(conductor: Conductor, server: HttpServer, listener: Listener, ready: Callable[[str], None]) -> None:
    """The conductor and its service, until cancelled or failed."""
    async with server.serving(listener) as url:
        run = asyncio.create_task(conductor.run())
        try:
            ready(url)
            await run
        finally:
            run.cancel()
            await asyncio.wait([run])


def sampling_of(config: Config, task_stop: tuple[str, ...], eos_token_ids: tuple[int, ...]) -> Sampling:
    rollout = config.rollout
    return Sampling(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        stop=tuple(dict.fromkeys([*rollout.stop, *task_stop])),
        stop_token_ids=tuple(eos_token_ids),
    )
