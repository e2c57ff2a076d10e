"""The first rank sends what is in the store, and vLLM's worker receives it: a real broadcast inside one process."""

import mmap
import threading

import pytest
import torch

from polyrhythm.engine.vllm.worker import polyrhythm_meeting
from polyrhythm.messages import Meeting
from polyrhythm.training import weight_sender
from polyrhythm.training.parallel.meeting import ConductorLine
from polyrhythm.training.weight_sender import WeightSender
from polyrhythm.weights.export import whole
from polyrhythm.weights.store import WeightStore
from tests.meeting_place import CREDENTIAL, DEADLINE_S, meeting_place

SENT = {"a": torch.arange(200_000, dtype=torch.float32).reshape(400, 500), "b": torch.arange(7, dtype=torch.int64)}
NUM_BYTES = sum(tensor.nbytes for tensor in SENT.values())


@pytest.fixture
def sender(tmp_path):
    store = WeightStore(tmp_path)
    store.file_bytes = 300_000  # several files
    store.publish([whole(name, tensor) for name, tensor in SENT.items()], 5)
    with meeting_place("trainer-0") as place:
        place.broadcasts.begin(2)
        yield WeightSender(ConductorLine(place.url, CREDENTIAL), lambda after: None, store)


def meeting(num_members: int, deadline_s: float = DEADLINE_S) -> Meeting:
    return Meeting(version=5, number=2, member=0, num_members=num_members, deadline_s=deadline_s)


def receiving(sender: WeightSender, member: int, num_members: int, outcomes: dict) -> threading.Thread:
    def receive() -> None:
        content = mmap.mmap(-1, NUM_BYTES)
        url = sender._line.url
        polyrhythm_meeting.receive(content, url, CREDENTIAL, 2, member, num_members, DEADLINE_S)
        outcomes[member] = bytes(content)

    thread = threading.Thread(target=receive)
    thread.start()
    return thread


def test_every_receiver_has_the_bytes_of_the_store(sender, monkeypatch):
    monkeypatch.setattr(weight_sender, "PIECE_BYTES", 300_000)
    monkeypatch.setattr(polyrhythm_meeting, "PIECE_BYTES", 300_000)
    outcomes: dict[int, bytes] = {}
    threads = [receiving(sender, member, 3, outcomes) for member in (1, 2)]
    sender.send(meeting(3))
    for thread in threads:
        thread.join(DEADLINE_S)
    expected = b"".join(tensor.numpy().tobytes() for tensor in SENT.values())
    assert outcomes == {1: expected, 2: expected}


def test_both_sides_agree_on_where_they_meet_and_how_tensors_are_divided():
    ours, theirs = weight_sender, polyrhythm_meeting
    assert (ours.PATH, ours.PIECE_BYTES) == (theirs.PATH, theirs.PIECE_BYTES)


def test_a_receiver_that_does_not_come_is_waited_for_until_the_deadline_and_said(sender, caplog):
    with pytest.raises(Exception, match=r"(?i)time|nobody has set it"):
        sender.send(meeting(2, deadline_s=0.5))
    sender._try_to_send(meeting(2, deadline_s=0.5))
    assert "weights v5 were not sent, engines read the store" in caplog.text


def test_a_receiver_without_a_sender_gives_up_too(sender):
    content = mmap.mmap(-1, NUM_BYTES)
    with pytest.raises((RuntimeError, OSError, ValueError)):
        polyrhythm_meeting.receive(content, sender._line.url, CREDENTIAL, 2, 1, 2, 0.5)
    with pytest.raises((RuntimeError, OSError, ValueError), match=r"401|403"):
        polyrhythm_meeting.receive(content, sender._line.url, "wrong", 2, 1, 2, 5.0)
