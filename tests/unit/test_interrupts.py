"""Where a signal may end the trainer, and where it has to wait."""

import signal
from collections.abc import Iterator, Sequence

import pytest
from torch import Tensor

from polyrhythm.cluster.signals import signals_handled
from polyrhythm.config import load_config
from polyrhythm.errors import AnotherFailed
from polyrhythm.interrupts import interrupts
from polyrhythm.loader import LoaderSettings, RolloutLoader
from polyrhythm.loop import train
from polyrhythm.observe.recorder import ActivityRecorder
from polyrhythm.training.checkpoint import Checkpoints
from polyrhythm.training.parallel.part import Part
from polyrhythm.training.parallel.replicate import WholeReplica
from polyrhythm.training.publication import Publication
from polyrhythm.training.trainer import Trainer
from polyrhythm.weights.store import WeightStore
from tests.conftest import ScriptedSource, build_tiny_model, make_group


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    interrupts._has_come = False
    with signals_handled(interrupts.handle, signal.SIGTERM):
        yield
    interrupts._has_come = False


class InterruptedSource(ScriptedSource):
    """A signal comes at one of the moments that the script writes down."""

    def __init__(self, moment: str):
        super().__init__([])
        self.moment = moment

    def published(self, version: int, metrics: dict[str, float]) -> None:
        super().published(version, metrics)
        self._interrupt(f"published {version}")

    def wait_for_engines(self, version: int, deadline_s: float) -> None:
        super().wait_for_engines(version, deadline_s)
        self.arrivals = [[make_group(position, step=version) for position in pair] for pair in ((0, 1), (2, 4))]
        self._interrupt(f"engines hold {version}")

    def groups(self, version: int, offset: int, until: int, wait_s: float):
        reply = super().groups(version, offset, until, wait_s)
        if wait_s > 0 and reply.groups:
            self._interrupt(f"groups {offset} of {version}")
        return reply

    def _interrupt(self, moment: str) -> None:
        if moment == self.moment:
            signal.raise_signal(signal.SIGTERM)


class FailingSource(InterruptedSource):
    """The conductor dies at that moment."""

    def _interrupt(self, moment: str) -> None:
        if moment == self.moment:
            raise AnotherFailed("the conductor does not answer")


def interrupted_at(
    moment: str, tmp_path, every: int = 100, updates_per_step: int = 1, source_type: type = InterruptedSource
) -> tuple[list[int], list[str]]:
    """The versions of the checkpoints that are there after the signal, and what the trainer had said until then."""
    rollout = {"group_size": 4, "groups_per_step": 4, "max_tokens": 9}
    training = {"checkpoint_every": every, "updates_per_step": updates_per_step}
    config = load_config([], {"num_steps": 4, "rollout": rollout, "training": training})
    trainer, source = Trainer(config, build_tiny_model("llama")), source_type(moment)  # pyright: ignore
    checkpoints = Checkpoints(tmp_path / "checkpoints", trainer)
    with interrupts.deferred(), pytest.raises((KeyboardInterrupt, AnotherFailed)), checkpoints.kept():
        train(
            RolloutLoader(source, LoaderSettings.of(config, share_prompt=True)), trainer,
            Publication(WeightStore(tmp_path / "weights"), trainer), checkpoints,
            ActivityRecorder("trainer"),
        )  # fmt: skip
    return checkpoints.store.versions(), source.events


@pytest.mark.parametrize("moment", ["published 2", "engines hold 2", "groups 0 of 2", "groups 2 of 2"])
def test_the_last_finished_step_is_written_wherever_the_next_one_is(tmp_path, moment):
    versions, events = interrupted_at(moment, tmp_path)
    assert versions == [2]
    assert "published 2" in events and "published 3" not in events


def test_a_signal_while_a_step_is_closed_waits_for_the_checkpoint_that_is_due(tmp_path):
    versions, events = interrupted_at("published 2", tmp_path, every=2)
    assert versions == [2] and events[-1] == "published 2"


def test_before_the_first_finished_step_nothing_is_written(tmp_path):
    assert interrupted_at("groups 2 of 0", tmp_path)[0] == []


def test_who_wants_no_checkpoints_gets_none(tmp_path):
    assert interrupted_at("groups 0 of 2", tmp_path, every=0)[0] == []


def test_after_the_first_of_several_updates_the_finished_step_is_gone_and_no_mixture_is_written(tmp_path):
    assert interrupted_at("groups 0 of 3", tmp_path, every=2, updates_per_step=2)[0] == [2, 3], "no update was made yet"
    interrupts._has_come = False
    assert interrupted_at("groups 2 of 3", tmp_path / "other", every=2, updates_per_step=2)[0] == [2]


@pytest.mark.parametrize("moment", ["engines hold 2", "groups 0 of 2", "groups 2 of 2"])
def test_the_last_finished_step_is_written_too_when_the_conductor_dies(tmp_path, moment):
    assert interrupted_at(moment, tmp_path, source_type=FailingSource)[0] == [2]


def test_a_step_that_the_conductor_did_not_commit_is_not_written(tmp_path):
    assert interrupted_at("published 2", tmp_path, source_type=FailingSource)[0] == []


class InterruptedReplica(WholeReplica):
    """Of two; a signal comes while gradients are added up."""

    def __init__(self):
        super().__init__(index=1, num=2)

    def agree(self, part: Part) -> list[Part]:
        return [part, part]

    def add_up(self, gradients: Sequence[Tensor], divisor: float) -> float:
        signal.raise_signal(signal.SIGTERM)
        return divisor


def test_a_signal_while_gradients_are_added_up_waits_for_the_end_of_the_step():
    trainer = Trainer(load_config([], {}), build_tiny_model("llama"), replica=InterruptedReplica())
    with interrupts.deferred(), pytest.raises(KeyboardInterrupt):
        trainer.optim_step()
        with interrupts.allowed():
            pass
    assert trainer.num_updates_in_step == 1, "the update was made before the interrupt came"


def test_a_second_signal_does_not_disturb_who_is_ending():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
