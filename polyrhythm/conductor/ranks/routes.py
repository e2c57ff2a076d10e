"""The routes by which ranks join and find each other; the conductor's service serves them to whoever has its credential."""

from aiohttp import web

from polyrhythm.conductor.admission import refuse_unfit
from polyrhythm.conductor.ranks.elastic import ElasticRanks
from polyrhythm.conductor.ranks.membership import FixedMembership
from polyrhythm.conductor.ranks.rendezvous import Rendezvous
from polyrhythm.http.errors import Refusal
from polyrhythm.http.server import Handler, packed, read_message
from polyrhythm.messages import RankBeat, RankJoin, RendezvousReply, RendezvousRequest, Setup

MAX_WAIT_S = 60.0


class RankRoutes:
    """Decodes what ranks say, asks membership and rendezvous, and encodes the answer."""

    def __init__(self, membership: FixedMembership | ElasticRanks, rendezvous: Rendezvous, setup: Setup | None = None):
        """`setup` is what every rank must be made of."""
        self._membership = membership
        self._rendezvous = rendezvous
        self._setup = setup

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/ranks/join", self._join),
            web.post("/ranks/heartbeat", self._heartbeat),
            web.post("/rendezvous", meeting_at(self._rendezvous)),
        ]

    async def _join(self, request: web.Request) -> web.Response:
        message = await read_message(request, RankJoin)
        if self._setup is not None:
            refuse_unfit(f"rank {message.name}".strip(), message.setup, self._setup, with_torch=True)
        return packed(await self._membership.join(message, min(message.wait_s, MAX_WAIT_S)))

    async def _heartbeat(self, request: web.Request) -> web.Response:
        beat = await read_message(request, RankBeat)
        await self._membership.heartbeat(beat, min(beat.wait_s, MAX_WAIT_S))
        return packed({})


def meeting_at(place: Rendezvous) -> Handler:
    """The route of a rendezvous."""

    async def meet(request: web.Request) -> web.Response:
        message = await read_message(request, RendezvousRequest)
        if not message.keys and message.operation != "num_keys":
            raise Refusal(f"{message.operation} needs a key")
        return packed(await _answer(place, message))

    return meet


async def _answer(place: Rendezvous, asked: RendezvousRequest) -> RendezvousReply:
    keys = asked.keys
    match asked.operation:
        case "get":
            return RendezvousReply(values=await place.get(asked.epoch, keys, min(asked.wait_s, MAX_WAIT_S)))
        case "set":
            place.set(asked.epoch, keys[0], asked.value)
            return RendezvousReply()
        case "add":
            return RendezvousReply(number=place.add(asked.epoch, keys[0], asked.amount))
        case "has":
            return RendezvousReply(number=int(place.has(asked.epoch, keys)))
        case "delete":
            return RendezvousReply(number=int(place.delete(asked.epoch, keys[0])))
        case "num_keys":
            return RendezvousReply(number=place.num_keys(asked.epoch))
        case "compare_set":
            return RendezvousReply(values=[place.compare_set(asked.epoch, keys[0], asked.expected, asked.value)])
