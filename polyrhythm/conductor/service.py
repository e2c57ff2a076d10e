"""The conductor's HTTP service: msgpack bodies of `wire`, a token for every route but /health."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web
from yarl import URL

from polyrhythm import messages
from polyrhythm.conductor.conductor import Conductor, Conflict, Dismissed, RunFailed
from polyrhythm.conductor.engines.client import HttpEngineClient
from polyrhythm.conductor.engines.cores import CorePlan
from polyrhythm.conductor.status import engine_view, run_status
from polyrhythm.conductor.steps.journal import Journal
from polyrhythm.config import Config
from polyrhythm.errors import UserError
from polyrhythm.http.async_client import open_session
from polyrhythm.http.credentials import Credentials
from polyrhythm.http.guard import ConnectionGuard
from polyrhythm.messages import EngineName, JoinRequest, Published, RunInfo, ThreadsRequest
from polyrhythm.observe.activity import ActivityReport
from polyrhythm.observe.status import Curves
from polyrhythm.rewards.functions import choose_rewards
from polyrhythm.rewards.sandbox.pool import RewardPool
from polyrhythm.rollout import ROLLOUTERS
from polyrhythm.types import Sampling
from polyrhythm.weights.server import WeightServer

MAX_WAIT_S = 60.0
ALL_GROUPS = 2**31 - 1
BODY_DEADLINE_S = 30.0
SHUTDOWN_DEADLINE_S = 1.0
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""How the processes of this machine reach a server that listens at all addresses."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Service:
    """The routes. Each decodes a message, asks the conductor, and encodes the answer."""

    def __init__(
        self,
        conductor: Conductor,
        admin_token: str,
        info: RunInfo | None = None,
        more_routes: Sequence[web.RouteDef] = (),
    ):
        if not admin_token:
            raise ValueError("a conductor without a token would serve anybody")
        self.guard = ConnectionGuard()
        self._conductor = conductor
        self._info = info
        self._more_routes = more_routes
        self._expected = f"Bearer {admin_token}".encode()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=messages.MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/status", self._status),
                web.get("/run", self._run),
                web.get("/engines", self._engines),
                web.post("/engines/join", self._join),
                web.post("/engines/heartbeat", self._heartbeat),
                web.post("/engines/drain", self._drain),
                web.post("/engines/remove", self._remove),
                web.post("/weights/published", self._published),
                web.get(r"/steps/{version:\d{1,9}}/ready", self._ready),
                web.get(r"/steps/{version:\d{1,9}}/groups", self._groups),
                web.post("/trainer/report", self._report),
                web.get("/trainer/threads", self._trainer_threads),
                *self._more_routes,
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse who has no token, and say every expected trouble in one line."""
        said = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if request.path != "/health" and not hmac.compare_digest(said, self._expected):
            return web.Response(status=401, text="a token is needed")
        if request.path != "/health":
            self.guard.admit(request)
        try:
            return await handler(request)
        except msgspec.DecodeError as error:
            return web.Response(status=400, text=f"the body cannot be read: {error}")
        except Conflict as error:
            return web.Response(status=409, text=str(error))
        except Dismissed as error:
            return web.Response(status=410, text=str(error))
        except RunFailed as error:
            return web.Response(status=503, text=str(error))

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _status(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(run_status(self._conductor)), content_type="application/json")

    async def _run(self, _: web.Request) -> web.Response:
        if self._info is None:
            raise web.HTTPNotFound(text="this run cannot be joined from elsewhere")
        return _reply(self._info)

    async def _join(self, request: web.Request) -> web.Response:
        self._conductor.join(await _message(request, JoinRequest))
        return _reply({})

    async def _engines(self, _: web.Request) -> web.Response:
        engines = [engine_view(engine) for engine in self._conductor.pool.engines]
        return web.Response(body=msgspec.json.encode(engines), content_type="application/json")

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self._conductor.heartbeat(await _message(request, JoinRequest))
        return _reply({})

    async def _drain(self, request: web.Request) -> web.Response:
        self._conductor.drain((await _message(request, EngineName)).name)
        return _reply({})

    async def _remove(self, request: web.Request) -> web.Response:
        self._conductor.remove((await _message(request, EngineName)).name)
        return _reply({})

    async def _published(self, request: web.Request) -> web.Response:
        self._conductor.published(await _message(request, Published))
        return _reply({})

    async def _ready(self, request: web.Request) -> web.Response:
        await self._conductor.wait_for_engines(int(request.match_info["version"]), int(_number(request, "rank")))
        return _reply({})

    async def _groups(self, request: web.Request) -> web.Response:
        version, wait_s = int(request.match_info["version"]), min(_number(request, "wait_s"), MAX_WAIT_S)
        offset, rank = int(_number(request, "offset")), int(_number(request, "rank"))
        until = int(_number(request, "until", default=ALL_GROUPS))
        return _reply(await self._conductor.groups(version, offset, until, wait_s, rank))

    async def _trainer_threads(self, request: web.Request) -> web.Response:
        known, wait_s = int(_number(request, "known")), min(_number(request, "wait_s"), MAX_WAIT_S)
        return _reply(ThreadsRequest(num_threads=await self._conductor.trainer_threads(known, wait_s)))

    async def _report(self, request: web.Request) -> web.Response:
        self._conductor.report(await _message(request, ActivityReport))
        return _reply({})


async def _message(request: web.Request, kind: type[T]) -> T:
    if request.content_type != messages.CONTENT_TYPE:
        raise web.HTTPUnsupportedMediaType(text=f"content type {messages.CONTENT_TYPE} is needed")
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            body = await request.read()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(text="the body came too slowly") from error
    return messages.decode(body, kind)


def _reply(message: object) -> web.Response:
    return web.Response(body=messages.encode(message), content_type=messages.CONTENT_TYPE)


def _number(request: web.Request, name: str, default: float = 0) -> float:
    try:
        value = float(request.query.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 <= value < 2**31:
        raise web.HTTPBadRequest(text=f"{name} must be a number from 0 on")
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
    cores: CorePlan | None = None,
    make_rewards: Callable[..., RewardPool] = RewardPool,
) -> None:
    """Serve until cancelled; RunError when the run cannot go on. `ready` is told the URL that listens."""
    from polyrhythm.observe.loggers import Loggers
    from polyrhythm.observe.loggers.jsonl import read_metrics
    from polyrhythm.tasks import ProblemStream, make_task
    from polyrhythm.tokenizer import Tokenizer

    task = make_task(config.task)
    tokenizer = Tokenizer(model_dir)
    functions, limits = choose_rewards(config.reward, task.reward), config.reward
    rewards = make_rewards(functions, limits.num_workers, limits.deadline_s, limits.memory_mb)
    with Loggers(run_dir) as logger:
        async with open_session() as session, rewards:
            conductor = Conductor(
                config,
                problems=ProblemStream(task, config.seed),
                rollouter=ROLLOUTERS["single_turn"](tokenizer, sampling_of(config, task.stop, tokenizer.eos_token_ids)),
                vocab_size=tokenizer.vocab_size,
                scorer=rewards,
                logger=logger,
                journal=Journal(run_dir / "journal"),
                connect=lambda url: HttpEngineClient(session, url, credentials),
                cores=cores,
                correct_above=None if task.reward and config.reward.functions else task.correct_above,
                first_step=first_step,
                curves=Curves(read_metrics(run_dir)),
            )
            weights = WeightServer(store_root, config.weights.load_deadline_s)
            service = Service(
                conductor, credentials["admin"], _run_info(config, model_dir, store_root), weights.routes()
            )
            await serve(conductor, service, config.conductor.host, port, ready)


def _run_info(config: Config, model_dir: Path, store_root: Path) -> RunInfo:
    return RunInfo(
        model=config.model,
        model_dir=str(model_dir),
        store_root=str(store_root),
        engine=config.engine.model_dump(),
        num_steps=config.num_steps,
        lease_s=config.conductor.lease_s,
        load_deadline_s=config.weights.load_deadline_s,
    )


async def serve(conductor: Conductor, service: Service, host: str, port: int, ready: Callable[[str], None]) -> None:
    """The conductor and its service, until cancelled or failed."""
    runner = web.AppRunner(
        service.application(),
        handler_cancellation=True,  # whoever is gone waits for nothing any more
        access_log=None,
        shutdown_timeout=SHUTDOWN_DEADLINE_S,
    )
    await runner.setup()
    run = asyncio.create_task(conductor.run())
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise UserError(
                f"conductor.host={host!r}, conductor.port={port}: cannot listen there: {error.strerror}"
            ) from None
        here = LOOPBACK_OF.get(host, host)
        ready(str(URL.build(scheme="http", host=here, port=runner.addresses[0][1])))
        async with service.guard.watching(runner.server):
            await run
    finally:
        run.cancel()
        await asyncio.wait([run])
        await runner.cleanup()


def sampling_of(config: Config, task_stop: tuple[str, ...], eos_token_ids: tuple[int, ...]) -> Sampling:
    rollout = config.rollout
    return Sampling(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        stop=tuple(dict.fromkeys([*rollout.stop, *task_stop])),
        stop_token_ids=tuple(eos_token_ids),
    )
