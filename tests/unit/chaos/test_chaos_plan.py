"""Chaos plans: what is possible, when a fault is due, and that a restarted part remembers what has fired."""

from pathlib import Path

import pytest

from polyrhythm.chaos.plan import ChaosPlan, Fault, Faults, check_ranks, damage, read_fault_log, read_plan
from polyrhythm.errors import UserError

EXAMPLE = Path(__file__).parents[3] / "configs" / "chaos.toml"


def faults_of(run_dir: Path, where: str, *faults: Fault, now=lambda: 0.0) -> Faults:
    return Faults(ChaosPlan(fault=list(faults)), run_dir, where, clock=now)


def test_a_fault_fires_at_the_nth_moment_from_its_step_on_and_only_so_often(tmp_path):
    faults = faults_of(tmp_path, "engine-0", Fault(what="error", where="engine-0", step=2, nth=2, times=2))
    fired = [bool(faults.due("request", step)) for step in (0, 1, 2, 2, 2, 2, 3)]
    assert fired == [False, False, False, True, True, False, False]


def test_a_fault_of_another_part_or_moment_is_not_due(tmp_path):
    faults = faults_of(
        tmp_path, "engine-0", Fault(what="kill", where="engine-1"), Fault(what="fail_load", where="engine-*")
    )
    assert faults.due("request", 0) is None
    due = faults.due("load", 0)
    assert due is not None and due.what == "fail_load"


def test_a_restarted_part_does_not_repeat_what_has_fired(tmp_path):
    kill = Fault(what="kill", where="engine-0", step=1)
    before = faults_of(tmp_path, "engine-0", kill)
    assert before.due("request", 1) is kill
    before.record(kill, 1, "request 1/0/3/0")
    assert faults_of(tmp_path, "engine-0", kill).due("request", 1) is None
    (line,) = read_fault_log(tmp_path)
    assert (line["what"], line["where"], line["step"], line["detail"]) == ("kill", "engine-0", 1, "request 1/0/3/0")


def test_random_faults_go_on_at_about_their_rate(tmp_path):
    now_s = [0.0]
    faults = faults_of(tmp_path, "engine-0", Fault(what="error", where="engine-*", every_s=5), now=lambda: now_s[0])
    num_fired = 0
    for tick in range(10_000):
        now_s[0] = tick * 0.1
        num_fired += faults.due("request", 0) is not None
    assert 140 < num_fired < 260


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[fault]]\nwhat = "nan"\nwhere = "trainer"', "fault 1: what='nan' cannot happen to trainer"),
        ('[[fault]]\nwhat = "kill"\nwhere = "gpu"', "fault 1: where='gpu' is nobody"),
        ('[[fault]]\nwhat = "kill"\nwhere = "trainer"\nat = "idle"', "fault 1: at='idle' is no moment of trainer"),
        ('[[fault]]\nwhat = "kill"\nwhere = "reward"\nstep = 2', "count scores with nth"),
        ('[[fault]]\nwhat = "nan"\nwhere = "engine-0"\nat = "load"', "fault 1: at='load' does not fit what='nan'"),
        ('[[fault]]\nwhat = "kill"\nwhere = "trainer"\nwhen = 2', "fault 1: when: extra inputs are not permitted"),
        ('[[fault]]\nwhere = "trainer"', "fault 1: what: field required"),
        ("[[fault", "is not valid TOML"),
    ],
)
def test_a_mistake_in_a_plan_is_said_with_the_number_of_the_fault(tmp_path, text, said):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_plan(path)
    assert said in str(error.value) and "plan.toml" in str(error.value)


def test_the_example_plan_is_valid_and_names_every_role():
    assert {fault.role for fault in read_plan(EXAMPLE).fault} == {"engine", "reward"}


def test_damage_leaves_a_file_of_another_size_or_content(tmp_path):
    path = tmp_path / "model.safetensors"
    for what, size in (("truncate_snapshot", 50), ("corrupt_snapshot", 100)):
        path.write_bytes(bytes(100))
        damage(path, what)
        assert path.stat().st_size == size
        assert path.read_bytes() != bytes(100)


def test_a_fault_of_a_rank_that_the_run_does_not_have_is_refused():
    one, two = ["trainer"], ["trainer-0", "trainer-1"]
    for where, fits in (("trainer", one), ("trainer-1", two), ("trainer-*", two), ("engine-9", one)):
        check_ranks(ChaosPlan(fault=[Fault(what="kill", where=where)]), fits)
    for where, names in (("trainer", two), ("trainer-*", one), ("trainer-2", two)):
        with pytest.raises(UserError, match=f"fault 1: where='{where.replace('*', '.')}.*use {names[0]}"):
            check_ranks(ChaosPlan(fault=[Fault(what="kill", where=where)]), names)


def test_only_a_slow_answer_waits_for_a_file():
    assert Fault(what="slow", where="engine-0", until="go").until == "go"
    with pytest.raises(ValueError, match="only a slow answer waits for a file"):
        Fault(what="error", where="engine-0", until="go")
