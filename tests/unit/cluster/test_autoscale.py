"""More engines when the trainer waits, fewer when they do: decided on numbers, acted on by name."""

import json

import pytest

from polyrhythm.cluster.fleet.autoscale import (
    COOL_DOWN_S,
    NUM_STEPS_SEEN,
    Autoscaler,
    StepDemand,
    decide,
    decide_ranks,
    demand_of,
)
from polyrhythm.config import ClusterConfig, load_config
from polyrhythm.errors import RunError, UserError
from tests.statuses import make_engine, make_status


def steps(num=NUM_STEPS_SEEN, *, serving=2, wait=0.0, idle=0.0) -> list[StepDemand]:
    return [StepDemand(serving, wait, idle)] * num


@pytest.mark.parametrize(
    ("wait", "idle", "num_engines", "change"),
    [
        (0.7, 0.0, 2, +1),  # the trainer waits
        (0.7, 0.0, 4, 0),  # the most are there already
        (0.0, 0.7, 2, -1),  # engines wait, and one alone would be done in time
        (0.0, 0.7, 1, 0),  # the fewest are there already
        (0.0, 0.55, 2, 0),  # one alone would take 0.9 of the step
        (0.2, 0.2, 2, 0),  # both work most of the time
        (0.6, 0.6, 2, 0),  # a synchronous schedule: both wait, in turns
        (0.38, 0.6, 2, 0),  # a synchronous schedule: with one fewer the trainer would wait too long
    ],
)
def test_decisions(wait, idle, num_engines, change):
    decision = decide(steps(wait=wait, idle=idle), num_engines, fewest=1, most=4)
    assert decision.change == change
    assert f"{wait:.0%}" in decision.reason and f"{idle:.0%}" in decision.reason


def test_nothing_is_decided_before_enough_steps_were_seen():
    assert decide(steps(NUM_STEPS_SEEN - 1, wait=0.9), 1, 1, 4).change == 0


def test_demand_is_read_from_the_metrics_of_a_step():
    metrics = {"time/step_s": 10.0, "time/load_s": 1.0, "generate/last_group_s": 3.0, "engines/serving": 2}
    assert demand_of(metrics | {"time/trainer_wait_s": 4.0}) == StepDemand(2, 0.4, 0.6)


class RecordingEngines:
    def __init__(self, num: int):
        self.names = [f"engine-{index}" for index in range(num)]
        self.events: list[str] = []
        self.refuses = False

    def start(self, name: str) -> None:
        self.events.append(f"start {name}")
        self.names.append(name)

    def stop(self, name: str) -> None:
        if self.refuses:
            raise RunError("the conductor cannot be reached")
        self.events.append(f"stop {name}")
        self.names.remove(name)


class Scene:
    """An autoscaler between 1 and 3 engines, and a run that finishes steps."""

    def __init__(self, path, num=2, **config):
        self.engines, self.notes, self.now_s, self.num_finished = RecordingEngines(num), [], 0.0, 0
        limits = ClusterConfig(**({"num_engines": num, "min_engines": 1, "max_engines": 3} | config))
        self.autoscaler = Autoscaler(limits, self.engines, path, self.notes.append, clock=lambda: self.now_s)
        self.now_s = COOL_DOWN_S

    def finish_steps(self, num=NUM_STEPS_SEEN, *, wait=0.0, idle=0.0, serving=None, elsewhere=0) -> None:
        names = [*self.engines.names, *(f"far-{index}" for index in range(elsewhere))]
        for _ in range(num):
            self.num_finished += 1
            last = {
                "time/step_s": 1.0, "time/load_s": 0.0, "generate/last_group_s": 1 - idle, "time/trainer_wait_s": wait,
                "engines/serving": len(names) if serving is None else serving,
            }  # fmt: skip
            engines = [make_engine(name) for name in names]
            status = make_status(num_finished_steps=self.num_finished, last_metrics=last, engines=engines)
            self.autoscaler.look(status)


@pytest.fixture
def scene(tmp_path) -> Scene:
    return Scene(tmp_path / "autoscale.jsonl")


def test_an_engine_is_started_when_the_trainer_waits_and_the_reason_is_written_down(scene, tmp_path):
    scene.finish_steps(wait=0.8)
    assert scene.engines.events == ["start engine-2"]
    (line,) = [json.loads(line) for line in (tmp_path / "autoscale.jsonl").read_text().splitlines()]
    assert (line["engine"], line["change"], line["engines"], line["steps"]) == ("engine-2", 1, 3, NUM_STEPS_SEEN)
    assert "the trainer waited 80%" in line["reason"] and "the trainer waited 80%" in scene.notes[0]


def test_the_youngest_engine_is_stopped_when_they_are_idle(scene):
    scene.finish_steps(idle=0.8)
    assert scene.engines.events == ["stop engine-1"]


def test_after_a_change_a_while_and_new_steps_are_waited_for(scene):
    scene.finish_steps(wait=0.8)
    scene.engines.names.remove("engine-2")
    scene.finish_steps(5, wait=0.8)
    assert len(scene.engines.events) == 1
    scene.now_s += COOL_DOWN_S
    scene.finish_steps(1, wait=0.8)
    assert len(scene.engines.events) == 2


def test_steps_that_not_all_engines_served_do_not_count(scene):
    scene.finish_steps(9, wait=0.8, serving=1)
    assert not scene.engines.events
    scene.finish_steps(NUM_STEPS_SEEN, wait=0.8, elsewhere=1)
    assert len(scene.engines.events) == 1


def test_an_engine_that_could_not_be_stopped_is_tried_again(scene, tmp_path):
    scene.engines.refuses = True
    scene.finish_steps(idle=0.8)
    assert "cannot be reached" in scene.notes[0] and not (tmp_path / "autoscale.jsonl").exists()
    scene.engines.refuses = False
    scene.finish_steps(1, idle=0.8)
    assert scene.engines.events == ["stop engine-1"]


def test_it_is_off_unless_a_range_is_given(tmp_path):
    scene = Scene(tmp_path / "autoscale.jsonl", min_engines=0, max_engines=0)
    scene.finish_steps(9, wait=0.9)
    assert not scene.engines.events


def test_a_range_that_excludes_the_first_number_is_refused():
    with pytest.raises(UserError, match=r"cluster\.num_engines=2 is not between cluster\.min_engines=3 and"):
        load_config([], {"cluster": {"num_engines": 2, "min_engines": 3}})


@pytest.mark.parametrize(
    ("wait", "idle", "num_ranks", "change", "said"),
    [
        (0.1, 0.8, 1, +1, "engines were idle 80% of the time: one more rank"),
        (0.1, 0.8, 3, 0, "but training.max_ranks=3 ranks are there"),
        (0.7, 0.1, 2, -1, "the trainer waited 70%"),
        (0.45, 0.1, 2, 0, "the trainer waited 45%"),
        (0.7, 0.1, 1, 0, "the trainer waited 70%"),
        (0.2, 0.2, 2, 0, "the trainer waited 20%"),
    ],
)
def test_ranks_become_more_when_engines_wait_and_fewer_when_they_wait_themselves(wait, idle, num_ranks, change, said):
    decision = decide_ranks([StepDemand(1, wait, idle)] * NUM_STEPS_SEEN, num_ranks, fewest=1, most=3)
    assert decision.change == change and said in decision.reason


class Fleet:
    """Processes by name, without any."""

    def __init__(self, *names: str):
        self.names = list(names)

    def start(self, name: str) -> None:
        self.names.append(name)

    def stop(self, name: str) -> None:
        self.names.remove(name)


def test_one_more_rank_is_started_before_an_engine_is_let_go(tmp_path):
    config = load_config([], {
        "cluster": {"num_engines": 2, "min_engines": 1, "max_engines": 2},
        "training": {"num_ranks": 1, "elastic": True, "max_ranks": 2},
    })  # fmt: skip
    engines, ranks, now_s = Fleet("engine-0", "engine-1"), Fleet("trainer-0"), [0.0]
    autoscaler = Autoscaler(
        config.cluster,
        engines,
        tmp_path / "autoscale.jsonl",
        lambda line: None,
        lambda: now_s[0],
        config.training,
        ranks,
    )
    metrics = {
        "engines/serving": 2, "time/step_s": 10.0, "time/load_s": 0.0, "generate/last_group_s": 1.0,
        "time/trainer_wait_s": 1.0,
    }  # fmt: skip
    for step in range(1, 9):
        now_s[0] += COOL_DOWN_S
        shown = make_status(num_finished_steps=step, last_metrics=metrics | {"ranks/num": len(ranks.names)})
        autoscaler.look(shown)
    assert ranks.names == ["trainer-0", "trainer-1"]
    assert engines.names == ["engine-0"], "when there is no room for another rank"
    lines = [json.loads(line) for line in (tmp_path / "autoscale.jsonl").read_text().splitlines()]
    assert [(line.get("rank") or line.get("engine"), line["change"]) for line in lines] == [
        ("trainer-1", 1),
        ("engine-1", -1),
    ]
    assert lines[0]["ranks"] == 2 and lines[0]["reason"].endswith("one more rank")
