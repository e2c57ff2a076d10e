"""Ranks join under their names and begin together."""

import asyncio

import msgspec
import pytest

from polyrhythm import messages
from polyrhythm.conductor.ranks import membership as room
from polyrhythm.conductor.ranks.membership import FixedMembership
from polyrhythm.conductor.ranks.rendezvous import Rendezvous
from polyrhythm.conductor.refusals import Conflict, Dismissed
from polyrhythm.messages import Membership, RankJoin

SETUP = messages.Setup("1.2.3", "4.5.6", {"config.json": "c0ffee", "tokenizer.json": "7ea"})
NAMES = ("trainer-0", "trainer-1")


@pytest.fixture
def ranks(monkeypatch) -> FixedMembership:
    monkeypatch.setattr(room, "TICK_S", 0.01)
    return FixedMembership(NAMES, 7, Rendezvous())


def joins(rank: int, member: str = "", wait_s: float = 0.0) -> RankJoin:
    return RankJoin(NAMES[rank], member or f"process {rank}", wait_s, setup=SETUP)


async def test_ranks_begin_when_all_are_there_in_the_order_of_their_names(ranks):
    assert await ranks.join(joins(1), 0) == Membership(0, ["trainer-1"], 7, "trainer-1")
    assert ranks.missing == ["trainer-0"]
    second = asyncio.create_task(ranks.join(joins(1), 10))
    await asyncio.sleep(0)
    assert not second.done()
    async with asyncio.timeout(5):
        assert await ranks.join(joins(0), 10) == Membership(1, [*NAMES], 7, "trainer-0")
        assert await second == Membership(1, [*NAMES], 7, "trainer-1")
    assert await ranks.join(joins(0), 0) == Membership(1, [*NAMES], 7, "trainer-0"), "to ask again is harmless"
    assert ranks.missing == []


async def test_a_name_that_is_none_or_taken_is_refused(ranks):
    await ranks.join(joins(0), 0)
    with pytest.raises(Conflict, match="no rank 'trainer-7' in this run: its ranks are trainer-0, trainer-1"):
        await ranks.join(RankJoin("trainer-7", "x", 0), 0)
    with pytest.raises(Conflict, match="trainer-0 has joined already"):
        await ranks.join(joins(0, "another process"), 0)


async def test_who_names_no_rank_gets_a_free_one_and_the_first_only_with_the_folder(monkeypatch):
    names = ("trainer-0", "trainer-1", "trainer-2")
    ranks = FixedMembership(names, 0, Rendezvous())

    async def takes(member: str, has_run_folder: bool = True) -> str:
        return (await ranks.join(RankJoin("", member, 0, has_run_folder), 0)).name

    assert await takes("a", has_run_folder=False) == "trainer-1"
    assert await takes("a", has_run_folder=False) == "trainer-1", "to ask again is harmless"
    assert await takes("b", has_run_folder=False) == "trainer-2"
    for name in ("", "trainer-0"):
        with pytest.raises(Conflict, match=r"trainer-0 writes .*: it needs the run's folder"):
            await ranks.join(RankJoin(name, "c", 0, has_run_folder=False), 0)
    assert await takes("c") == "trainer-0"
    with pytest.raises(Conflict, match=r"no rank is free: the run itself starts 0 of training\.num_ranks=3"):
        await takes("d")
    partly = FixedMembership(names, 0, Rendezvous(), num_here=2)
    assert (await partly.join(RankJoin("", "a", 0), 0)).name == "trainer-2", "the run starts the others"
    with pytest.raises(Conflict, match="the run itself starts 2"):
        await partly.join(RankJoin("", "b", 0), 0)


async def test_who_is_silent_before_the_others_came_can_be_replaced_and_is_not_counted(ranks, monkeypatch):
    await ranks.join(joins(0), 0)
    monkeypatch.setattr(room, "SILENCE_S", 0.0)
    assert (await ranks.join(joins(1), 0)).epoch == 0, "the first has not asked again"
    monkeypatch.setattr(room, "SILENCE_S", 5.0)
    ranks._places["trainer-0"].seen_s -= 6
    assert (await ranks.join(joins(0, "another process"), 0)).epoch == 1
    ranks._places["trainer-1"].seen_s -= 6
    with pytest.raises(Conflict, match="joined already"):
        await ranks.join(joins(1, "another process"), 0)


async def test_ranks_join_and_meet_at_the_conductor_and_a_failed_run_says_why(make_stage):
    stage = await make_stage(training={"num_ranks": 2})
    await stage.call("POST", "/ranks/join", joins(0))
    assert (await stage.status()).waiting == "everybody waits for trainer-1 to join"
    both = [asyncio.create_task(stage.call("POST", "/ranks/join", joins(rank, wait_s=10))) for rank in (0, 1)]
    for name, (status, body) in zip(NAMES, await asyncio.gather(*both), strict=True):
        assert status == 200 and messages.decode(body, Membership) == Membership(1, [*NAMES], 0, name, 60.0)
    get = messages.RendezvousRequest(1, "get", ["a"], wait_s=10)
    waiting = asyncio.create_task(stage.call("POST", "/rendezvous", get))
    set_ = messages.RendezvousRequest(1, "set", ["a"], value=b"b")
    assert (await stage.call("POST", "/rendezvous", set_))[0] == 200
    status, body = await waiting
    assert status == 200 and messages.decode(body, messages.RendezvousReply).values == [b"b"]
    waiting = asyncio.create_task(
        stage.call("POST", "/rendezvous", messages.RendezvousRequest(1, "get", ["c"], wait_s=10))
    )
    await asyncio.sleep(0.05)
    stage.conductor.fail("an engine burnt down")
    assert await waiting == (503, b"an engine burnt down")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (messages.RendezvousRequest(1, "get"), 400),
        (messages.RendezvousRequest(9, "num_keys"), 409),
        ({"epoch": 1, "operation": "list", "keys": ["a"]}, 400),
        ({"epoch": 1, "operation": "get", "keys": ["a"], "wait_s": -1}, 400),
    ],
)
async def test_what_makes_no_sense_at_the_rendezvous_is_refused(make_stage, request_, status):
    stage = await make_stage()
    assert (await stage.call("POST", "/rendezvous", request_))[0] == status


def beats(rank: int, member: str = "", is_leaving: bool = False) -> messages.RankBeat:
    return messages.RankBeat(NAMES[rank], member or f"process {rank}", is_leaving=is_leaving)


async def test_a_rank_without_a_sign_of_life_is_lost_unless_it_has_left_or_all_is_done(ranks):
    await ranks.join(joins(0), 0)
    await ranks.join(joins(1), 0)
    for place in ranks._places.values():
        place.seen_s -= 61
    assert ranks.why_lost(is_over=False) is None, "they start"
    for rank in (0, 1):
        await ranks.heartbeat(beats(rank), 0)
    for place in ranks._places.values():
        place.seen_s -= 61
    assert ranks.why_lost(is_over=False) == "rank trainer-0 gave no sign of life for 61 s (conductor.lease_s=60)"
    assert "trainer-0" in ranks.why_lost(is_over=True), "the trained model is not saved"
    await ranks.heartbeat(beats(0), 0)
    assert "trainer-1" in ranks.why_lost(is_over=False) and ranks.why_lost(is_over=True) is None
    await ranks.heartbeat(beats(1, is_leaving=True), 0)
    ranks._places["trainer-1"].seen_s -= 61
    assert ranks.why_lost(is_over=False) is None
    with pytest.raises(Dismissed, match="rank trainer-0 is another process"):
        await ranks.heartbeat(beats(0, "process of an earlier run"), 0)


async def test_a_lost_rank_ends_the_run_and_those_who_live_hear_why(make_stage):
    stage = await make_stage(training={"num_ranks": 2}, conductor={"lease_s": 0.5})
    both = [asyncio.create_task(stage.call("POST", "/ranks/join", joins(rank, wait_s=10))) for rank in (0, 1)]
    await asyncio.gather(*both)
    assert (await stage.call("POST", "/ranks/heartbeat", beats(1)))[0] == 200
    async with asyncio.timeout(10):
        while (heard := await stage.call("POST", "/ranks/heartbeat", beats(0)))[0] == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert heard[0] == 503 and heard[1].startswith(b"rank trainer-1 gave no sign of life for")


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        (msgspec.structs.replace(SETUP, package="1.2.2"), b"it has polyrhythm 1.2.2, the run has 1.2.3"),
        (msgspec.structs.replace(SETUP, torch="4.0.0"), b"it has torch 4.0.0, the run has 4.5.6"),
        (
            msgspec.structs.replace(SETUP, model={**SETUP.model, "config.json": "another"}),
            b"its model is another one than the run's, by config.json",
        ),
        (None, b"it does not say what it is made of"),
    ],
)
async def test_a_rank_that_is_made_of_something_else_is_refused_with_what_differs(make_stage, caplog, setup, said):
    stage = await make_stage()
    status, body = await stage.call("POST", "/ranks/join", RankJoin("trainer", "process", 0, setup=setup))
    assert (status, body) == (412, b"rank trainer does not fit this run: " + said)
    assert said.decode() in caplog.text, "the conductor's side hears of it too"


async def test_an_engine_of_another_package_or_model_is_refused_whatever_its_torch_is(make_stage):
    stage = await make_stage()
    me = stage.joining("other", "http://127.0.0.1:9")
    another = msgspec.structs.replace(SETUP, package="9.9.9", torch="0.0.1", model={})
    status, body = await stage.call("POST", "/engines/join", msgspec.structs.replace(me, setup=another))
    assert status == 412 and body.decode() == (
        "engine other does not fit this run: it has polyrhythm 9.9.9, the run has 1.2.3; "
        "its model is another one than the run's, by config.json and tokenizer.json"
    )
    cpu_build = msgspec.structs.replace(SETUP, torch="0.0.1")
    assert (await stage.call("POST", "/engines/join", msgspec.structs.replace(me, setup=cpu_build)))[0] == 200
