"""The store that torch.distributed asks, the interface that ranks bind to, and what is said when they do not meet."""

import threading
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from polyrhythm.errors import AnotherFailed, RunError
from polyrhythm.training.parallel import meeting
from polyrhythm.training.parallel.meeting import ConductorLine, ConductorStore, interface_to
from tests.meeting_place import CREDENTIAL, MeetingPlace, meeting_place

SHORT = timedelta(seconds=0.1)
LONG = timedelta(seconds=20)


@pytest.fixture(scope="module")
def place():
    with meeting_place("trainer-0", "trainer-1") as place:
        place.rendezvous.begin(3)
        yield place


def store_at(place: MeetingPlace, deadline: timedelta = LONG) -> ConductorStore:
    return ConductorStore(ConductorLine(place.url, CREDENTIAL), 3, deadline)


def test_a_store_does_what_those_of_torch_do(place):
    store, others = store_at(place), dist.PrefixStore("a group", store_at(place))
    store.set("a", "text")
    store.set("b", b"\x00\xff")
    assert (store.get("a"), store.get("b")) == (b"text", b"\x00\xff")
    assert store.add("n", 2) == 2 and others.add("n", 5) == 5 and store.add("n", 1) == 3
    assert store.check(["a", "b"]) and not store.check(["a", "x"])
    assert store.compare_set("c", "", "first") == b"first" == store.compare_set("c", "other", "x")
    assert store.num_keys() == 5 and store.delete_key("a") and not store.delete_key("a")
    others.set("deep", "x")  # torch's own class calls ours
    assert others.get("deep") == store.get("a group/deep") == b"x"
    others.wait(["deep"], timedelta(seconds=1))


def test_a_get_waits_in_its_own_thread_and_others_may_call_meanwhile(place):
    store, got = store_at(place), []
    waiting = threading.Thread(target=lambda: got.append(store.get("late")))
    waiting.start()
    store.set("late", "here")
    waiting.join(20)
    assert got == [b"here"]


def test_nobody_waits_longer_than_the_deadline(place):
    with pytest.raises(dist.DistStoreError, match="missing: nobody has set it within 0:00:00"):
        store_at(place, SHORT).get("missing")
    with pytest.raises(dist.DistStoreError, match="missing"):
        store_at(place).wait(["missing"], SHORT)


def test_a_store_of_another_epoch_a_wrong_token_and_nobody_there_are_said(place):
    with pytest.raises(RunError, match="epoch 2 of the ranks is not the one that is going on, 3"):
        ConductorStore(ConductorLine(place.url, CREDENTIAL), 2, LONG).get("a")
    with pytest.raises(RunError, match="401: a token is needed"):
        ConductorStore(ConductorLine(place.url, "wrong"), 3, LONG).get("a")
    with pytest.raises(AnotherFailed, match="the conductor cannot be reached"):
        ConductorStore(ConductorLine("http://127.0.0.1:9", CREDENTIAL), 3, LONG).get("a")


def test_ranks_bind_to_the_interface_by_which_the_conductor_is_reached(monkeypatch):
    loopback = next(n for n, rows in psutil.net_if_addrs().items() if any(r.address == "127.0.0.1" for r in rows))
    assert interface_to("http://127.0.0.1:80") == interface_to("http://127.0.0.3:80") == loopback
    for name, rows in psutil.net_if_addrs().items():
        address = rows[0].address
        if rows[0].family.name == "AF_INET" and name != loopback:
            assert interface_to(f"http://{address}:80") == name, "a conductor on this machine, reached as others do"
    monkeypatch.setattr(meeting, "_address_towards", lambda url: "192.0.2.7")
    with pytest.raises(RunError, match=r"has the address 192\.0\.2\.7, by which it reaches http://x"):
        interface_to("http://x")
