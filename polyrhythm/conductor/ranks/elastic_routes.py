"""The routes of elastic ranks; the conductor's service serves them to whoever has its credential."""

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from polyrhythm.conductor.ranks.elastic import ElasticRanks
from polyrhythm.conductor.refusals import Conflict
from polyrhythm.http.server import packed, read_message
from polyrhythm.messages import RankDuty, RankEnter, RankFailed, RankName, RankReady, RankReduced, RankStay

MAX_WAIT_S = 60.0


class ElasticRoutes:
    """Decodes what ranks say, asks the ranks' part of the conductor, and encodes the answer."""

    def __init__(self, ranks: ElasticRanks | None):
        self._maybe_ranks = ranks

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/ranks/enter", self._waiting(RankEnter, lambda ranks: ranks.enter)),
            web.post("/ranks/stay", self._waiting(RankStay, lambda ranks: ranks.stay)),
            web.post("/ranks/ready", self._waiting(RankReady, lambda ranks: ranks.ready)),
            web.post("/ranks/reduced", self._waiting(RankReduced, lambda ranks: ranks.reduced)),
            web.post("/ranks/duty", self._waiting(RankDuty, lambda ranks: ranks.duty)),
            web.post("/ranks/failed", self._failed),
            web.post("/ranks/drain", self._named(lambda ranks: ranks.drain)),
            web.post("/ranks/remove", self._named(lambda ranks: ranks.remove)),
            web.post("/ranks/ended", self._named(lambda ranks: ranks.ended)),
        ]

    @property
    def _ranks(self) -> ElasticRanks:
        if self._maybe_ranks is None:
            raise Conflict("the ranks of this run stay as they are: training.elastic is false")
        return self._maybe_ranks

    def _waiting(self, kind: Any, method: Callable[[ElasticRanks], Callable[[Any, float], Awaitable[Any]]]):
        async def answer(request: web.Request) -> web.Response:
            message = await read_message(request, kind)
            return packed(await method(self._ranks)(message, min(message.wait_s, MAX_WAIT_S)))

        return answer

    def _named(self, method: Callable[[ElasticRanks], Callable[[str], None]]):
        async def answer(request: web.Request) -> web.Response:
            method(self._ranks)((await read_message(request, RankName)).name)
            return packed({})

        return answer

    async def _failed(self, request: web.Request) -> web.Response:
        self._ranks.failed(await read_message(request, RankFailed))
        return packed({})
