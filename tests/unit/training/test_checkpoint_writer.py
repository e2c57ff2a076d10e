"""The thread that writes checkpoints: training goes on meanwhile, and hears of what fails."""

import threading
from types import SimpleNamespace

import pytest
import torch

from polyrhythm.config import load_config
from polyrhythm.errors import RunError
from polyrhythm.observe.recorder import ActivityRecorder
from polyrhythm.training import checkpoint_writer
from polyrhythm.training.checkpoint import Checkpoints
from polyrhythm.training.checkpoint_writer import CheckpointWriter, free_memory
from polyrhythm.training.parallel.elastic.replica import ElasticReplica
from polyrhythm.training.parallel.replica import Replica
from polyrhythm.training.trainer import Trainer
from polyrhythm.weights.export import whole
from polyrhythm.weights.snapshot import newest_whole_version
from polyrhythm.weights.store import WeightStore
from tests.conftest import build_tiny_model

DEADLINE_S = 60.0


class SlowStore(WeightStore):
    """A disk that writes when it is told to."""

    def __init__(self, root):
        super().__init__(root)
        self.may_write = threading.Event()
        self.events = []

    def publish(self, exported, version, probe=None):
        self.events.append(f"begins {version}")
        assert self.may_write.wait(DEADLINE_S)
        path = super().publish(exported, version)
        self.events.append(f"has written {version}")
        return path


class FullStore(WeightStore):
    def publish(self, exported, version, probe=None):
        raise RunError("No space left on device: make room")


def test_the_loop_goes_on_while_a_checkpoint_is_written_and_what_is_written_is_what_was_there(tmp_path):
    store = SlowStore(tmp_path)
    writer, weight = CheckpointWriter(store), torch.ones(1000)
    writer.begin([whole("weight", weight)], version=1)
    weight.fill_(2.0)  # the next update
    store.may_write.set()
    writer.finish()
    store.load_into({"weight": weight}, 1)
    assert torch.equal(weight, torch.ones(1000))


def test_the_next_checkpoint_waits_for_the_one_before(tmp_path):
    store = SlowStore(tmp_path)
    writer, weight = CheckpointWriter(store), torch.ones(10)
    writer.begin([whole("weight", weight)], version=1)
    threading.Timer(0.1, store.may_write.set).start()
    writer.begin([whole("weight", weight)], version=2)
    writer.finish()
    assert store.events == ["begins 1", "has written 1", "begins 2", "has written 2"]


def test_a_disk_that_never_answers_ends_the_run_at_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "writing_deadline_s", lambda num_bytes: 0.05)
    writer = CheckpointWriter(store := SlowStore(tmp_path))
    writer.begin([whole("weight", torch.ones(10))], version=1)
    with pytest.raises(RunError, match=r"checkpoint of step 1 was not written within 0 s: is the disk of .* too slow"):
        writer.finish()
    store.may_write.set()


def test_without_room_for_a_copy_it_is_written_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "free_memory", lambda: 50)
    CheckpointWriter(WeightStore(tmp_path)).begin([whole("weight", torch.ones(10))], version=1)
    assert newest_whole_version(tmp_path) == 1


def test_free_memory_heeds_the_limit_of_a_container(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "CGROUP", tmp_path)
    machine = free_memory()
    assert machine > 2**20
    for name, content in {
        "memory.max": "1000\n",
        "memory.current": "900\n",
        "memory.stat": "anon 5\ninactive_file 40\n",
    }.items():
        (tmp_path / name).write_text(content)
    assert free_memory() == 140
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() == pytest.approx(machine, rel=0.9)


def test_a_checkpoint_that_could_not_be_written_ends_the_run_at_the_next_step(tmp_path):
    checkpoints = checkpoints_in(tmp_path, every=2)
    checkpoints._writer = CheckpointWriter(FullStore(tmp_path))
    checkpoints.save_if_due(2)
    checkpoints._writer._thread.join(DEADLINE_S)
    with pytest.raises(
        RunError, match="checkpoint of step 2 could not be written: No space left on device: make room; go on"
    ):
        checkpoints.save_if_due(3)


def test_whatever_ends_the_training_the_checkpoint_that_was_begun_is_finished(tmp_path):
    checkpoints = checkpoints_in(tmp_path, every=2)
    store = SlowStore(tmp_path)
    checkpoints._writer = CheckpointWriter(store)
    with pytest.raises(ValueError, match="a mistake"), checkpoints.kept():
        checkpoints.save_if_due(2)
        threading.Timer(0.1, store.may_write.set).start()
        raise ValueError("a mistake")
    assert newest_whole_version(tmp_path) == 2


@pytest.mark.parametrize("is_first", [True, False])
def test_of_elastic_ranks_the_first_that_is_left_saves_what_is_finished(tmp_path, is_first):
    place = SimpleNamespace(member="a rank that has never published", is_first=is_first)
    replica = ElasticReplica("http://127.0.0.1:1", "", place, 10.0, ActivityRecorder("trainer"))  # pyright: ignore
    checkpoints = checkpoints_in(tmp_path, every=100, replica=replica)
    with pytest.raises(KeyboardInterrupt), checkpoints.kept():
        checkpoints.save_if_due(2)
        raise KeyboardInterrupt
    assert checkpoints.store.versions() == ([2] if is_first else [])


def test_as_many_are_kept_as_the_configuration_says(tmp_path):
    checkpoints = checkpoints_in(tmp_path, every=1, keep_checkpoints=3)
    for version in range(1, 6):
        checkpoints.save_if_due(version)
    checkpoints.save_last(5)
    assert checkpoints.store.versions() == [3, 4, 5]


def checkpoints_in(root, every: int, replica: Replica | None = None, **training) -> Checkpoints:
    config = load_config([], {"training": {"checkpoint_every": every, **training}})
    return Checkpoints(root, Trainer(config, build_tiny_model("llama"), replica=replica))
