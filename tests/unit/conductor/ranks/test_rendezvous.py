"""Keys and values by which ranks find each other, and who may still ask for them."""

import asyncio
import time

import pytest

from polyrhythm.conductor.ranks import rendezvous as room
from polyrhythm.conductor.ranks.rendezvous import Rendezvous
from polyrhythm.conductor.refusals import Conflict, RunFailed
from polyrhythm.http.errors import Refusal


@pytest.fixture
def place() -> Rendezvous:
    place = Rendezvous()
    place.begin(1)
    return place


async def test_what_was_set_is_got_counted_compared_and_deleted(place):
    place.set(1, "a", b"\x00\xff")
    assert await place.get(1, ["a"], 0) == [b"\x00\xff"]
    assert [place.add(1, "n", amount) for amount in (2, -5)] == [2, -3]
    assert place.compare_set(1, "c", b"", b"first") == b"first"
    assert place.compare_set(1, "c", b"other", b"second") == b"first"
    assert place.compare_set(1, "c", b"first", b"second") == b"second"
    assert place.has(1, ["a", "n", "c"]) and not place.has(1, ["a", "b"]) and place.num_keys(1) == 3
    assert place.delete(1, "a") and not place.delete(1, "a") and place.num_keys(1) == 2


async def test_a_get_waits_for_all_of_its_keys_and_not_for_ever(place):
    waiting = asyncio.create_task(place.get(1, ["a", "b"], 10))
    for key in ("a", "b"):
        await asyncio.sleep(0)
        assert not waiting.done()
        place.set(1, key, key.encode())
    async with asyncio.timeout(5):
        assert await waiting == [b"a", b"b"]
    started_s = time.monotonic()
    assert await place.get(1, ["c"], 0.05) is None
    assert time.monotonic() - started_s >= 0.05


async def test_the_next_epoch_has_none_of_the_keys_and_whoever_waits_in_the_last_is_refused(place):
    place.set(1, "a", b"old")
    waiting = asyncio.create_task(place.get(1, ["b"], 10))
    await asyncio.sleep(0)
    place.begin(2)
    with pytest.raises(Conflict, match="epoch 1 of the ranks is not the one that is going on, 2"):
        async with asyncio.timeout(5):
            await waiting
    assert not place.has(2, ["a"]) and place.num_keys(2) == 0
    for late in (lambda: place.set(1, "a", b""), lambda: place.add(1, "a", 1), lambda: place.has(3, ["a"])):
        with pytest.raises(Conflict):
            late()


async def test_a_run_that_fails_lets_nobody_wait(monkeypatch):
    failure: list[str] = []

    def check() -> None:
        if failure:
            raise RunFailed(failure[0])

    monkeypatch.setattr(room, "TICK_S", 0.01)
    place = Rendezvous(check)
    place.begin(1)
    waiting = asyncio.create_task(place.get(1, ["a"], 10))
    await asyncio.sleep(0)
    failure.append("an engine burnt down")
    with pytest.raises(RunFailed, match="burnt"):
        async with asyncio.timeout(5):
            await waiting


def test_it_holds_no_more_than_its_limits(place, monkeypatch):
    monkeypatch.setattr(room, "MAX_KEYS", 2)
    monkeypatch.setattr(room, "MAX_BYTES", 10)
    monkeypatch.setattr(room, "MAX_VALUE_BYTES", 8)
    for key, value in (("a", b"x" * 9), ("k" * 1001, b"")):
        with pytest.raises(Refusal, match="at most 1000 characters, a value at most 8 bytes"):
            place.set(1, key, value)
    place.set(1, "a", b"x" * 8)
    with pytest.raises(Refusal, match="at most 2 keys and 10 bytes"):
        place.set(1, "b", b"x" * 3)
    place.set(1, "a", b"")  # what is replaced makes room
    place.set(1, "b", b"x" * 8)
    place.delete(1, "a")
    place.set(1, "c", b"xx")
    with pytest.raises(Refusal, match="at most 2 keys"):
        place.add(1, "d", 1)
    with pytest.raises(Conflict, match="'c' is no number"):
        place.add(1, "c", 1)
