"""Real processes, faults by plan, one oracle: the final weights equal those of the undisturbed run byte for byte.

Every case asserts the witness of each fault, and that no rollout was lost, replaced or counted twice.
"""

import fcntl
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polyrhythm.chaos.plan import read_fault_log
from polyrhythm.messages import EngineName
from polyrhythm.weights.snapshot import newest_whole_version
from tests.chaos.conftest import FLAGS
from tests.integration.conftest import Cli, Outcome

NUM_STEPS = FLAGS["num_steps"]


def write_plan(cli: Cli, *faults: dict) -> str:
    lines = []
    for fault in faults:
        lines += ["[[fault]]", *(f"{key} = {json.dumps(value)}" for key, value in fault.items())]
    (cli.work_dir / "plan.toml").write_text("\n".join(lines))
    return "plan.toml"


def disturbed(cli: Cli, *faults: dict, **flags) -> Outcome:
    plan = write_plan(cli, *faults)
    return cli.run(*cli.arguments(**(FLAGS | flags)), "--chaos", plan)


def resumed(cli: Cli, broken: Outcome) -> Outcome:
    assert broken.returncode == 1, broken.output
    outcome = cli.run("train", "--resume", str(broken.run_dir), "--observe.view", "plain")
    assert outcome.run_dir == broken.run_dir
    assert "going on with" in outcome.output and "starts over" not in outcome.output
    return outcome


def fired(outcome: Outcome) -> list[tuple[str, str]]:
    return sorted((line["what"], line["where"]) for line in read_fault_log(outcome.run_dir))


def total(outcome: Outcome, metric: str) -> float:
    return sum(row[metric] for row in outcome.metrics())


def assert_nothing_was_lost(outcome: Outcome, undisturbed: bytes, num_refused: int = 0, num_duplicates: int = 0):
    assert outcome.returncode == 0, outcome.output
    assert [row["step"] for row in outcome.metrics()] == list(range(1, NUM_STEPS + 1))
    assert total(outcome, "groups/replaced") == 0
    assert total(outcome, "reward/excluded") == 0
    assert total(outcome, "ledger/duplicates") == num_duplicates
    assert total(outcome, "onpolicy/violations") == num_refused, "answers of another version are refused and counted"
    assert outcome.weights() == undisturbed


def test_engines_killed_idle_and_in_the_middle_of_a_group_are_restarted(cli, undisturbed):
    outcome = disturbed(
        cli,
        {"what": "kill", "where": "engine-0", "step": 1, "at": "idle"},
        {"what": "kill", "where": "engine-1", "step": 2, "at": "request", "nth": 2},
    )
    assert fired(outcome) == [("kill", "engine-0"), ("kill", "engine-1")]
    details = {line["where"]: line["detail"] for line in read_fault_log(outcome.run_dir)}
    assert details["engine-0"] == "idle" and not details["engine-1"].endswith(" 0 completions running")
    assert total(outcome, "engines/lost") >= 1
    assert_nothing_was_lost(outcome, undisturbed)


def test_a_stopped_engine_and_one_ten_times_slower_lose_nothing(cli, undisturbed):
    outcome = disturbed(
        cli,
        {"what": "stop", "where": "engine-0", "step": 1, "for_s": 4},
        {"what": "slow", "where": "engine-1", "step": 3, "factor": 10, "times": 8},
        conductor__request_deadline_s=2,
        conductor__max_attempts=100,  # on a busy machine more answers than that one are late
        conductor__hedge_groups=2,
    )
    assert set(fired(outcome)) == {("stop", "engine-0"), ("slow", "engine-1")}
    assert total(outcome, "dispatch/retries") >= 1, "what the stopped engine had went elsewhere"
    assert_nothing_was_lost(outcome, undisturbed)


def test_errors_resets_torn_answers_and_nan_are_asked_for_again(cli, undisturbed):
    kinds = ["error", "reset", "truncate", "nan"]
    # At whichever engine: one that has just failed gets nothing for a moment, and steps are short.
    outcome = disturbed(cli, *({"what": what, "where": "engine-*", "step": step} for step, what in enumerate(kinds)))
    faults = [what for what, _ in fired(outcome)]
    assert set(faults) == set(kinds)
    assert total(outcome, "dispatch/retries") == len(faults)
    assert total(outcome, "ledger/refused") == faults.count("nan"), "one completion without numbers each"
    assert_nothing_was_lost(outcome, undisturbed)


def test_wrong_versions_repeated_and_overtaken_answers_are_not_counted(cli, undisturbed):
    outcome = disturbed(
        cli,
        {"what": "duplicate", "where": "engine-0", "step": 0},
        {"what": "reorder", "where": "engine-1", "step": 0},
        {"what": "wrong_version", "where": "engine-1", "step": 1},
    )
    assert fired(outcome) == [("duplicate", "engine-0"), ("reorder", "engine-1"), ("wrong_version", "engine-1")]
    assert_nothing_was_lost(outcome, undisturbed, num_refused=4, num_duplicates=4)


def test_a_snapshot_that_one_engine_finds_damaged_and_a_failing_load_are_never_served(cli, undisturbed):
    outcome = disturbed(
        cli,
        {"what": "truncate_snapshot", "where": "engine-0", "step": 1},
        {"what": "corrupt_snapshot", "where": "engine-1", "step": 2},
        {"what": "fail_load", "where": "engine-0", "step": 3},
    )
    faults = [("corrupt_snapshot", "engine-1"), ("fail_load", "engine-0"), ("truncate_snapshot", "engine-0")]
    assert fired(outcome) == faults
    said = (outcome.run_dir / "logs" / "conductor.log").read_text()
    assert "the snapshot is torn" in said and "digests differ" in said
    assert_nothing_was_lost(outcome, undisturbed)


def test_reward_workers_that_die_or_hang_once_are_asked_again(cli, undisturbed):
    outcome = disturbed(
        cli,
        {"what": "kill", "where": "reward", "nth": 5},
        {"what": "stop", "where": "reward", "nth": 16},
        reward__deadline_s=5,
    )
    assert fired(outcome) == [("kill", "reward"), ("stop", "reward")]
    assert_nothing_was_lost(outcome, undisturbed)


def test_an_engine_that_joins_and_one_that_is_drained_in_the_middle_of_a_step(cli, undisturbed):
    answers_come = cli.work_dir / "answers_come"
    # max_batch 16 and groups of 4: engine-0 holds 5 of the 6 groups of step 1 until it is told to answer.
    held = {"what": "slow", "where": "engine-0", "step": 1, "until": str(answers_come), "times": 5}
    flags = FLAGS | {"cluster__num_engines": 1, "conductor__request_deadline_s": 1000}
    process = cli.start([*cli.arguments(**flags), "--chaos", write_plan(cli, held)])
    run = cli.wait_for_steps(1)
    cli.wait_for(lambda: read_fault_log(run), "the slow answer")
    second = cli.start(["engine", "--run", str(run), "--name", "engine-1"])

    def second_engine_serves() -> bool:
        engines = {engine["name"]: engine for engine in json.loads(cli.ask_conductor(run, "/engines"))}
        return "engine-1" in engines and engines["engine-1"]["policy_version"] == 1

    try:
        cli.wait_for(second_engine_serves, "engine-1 at version 1")
        cli.ask_conductor(run, "/engines/drain", EngineName("engine-0"))
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 1, "this was in the middle of step 1"
        answers_come.touch()
        outcome = cli.finish(process)
        assert total(outcome, "dispatch/retries") == 0, "draining loses nothing"
        assert outcome.metrics()[-1]["engines/serving"] == 1
        assert_nothing_was_lost(outcome, undisturbed)
    finally:
        second.kill()
        second.communicate(timeout=60)


def test_a_trainer_killed_between_update_and_commit_is_resumed(cli, undisturbed):
    broken = disturbed(cli, {"what": "kill", "where": "trainer", "step": 2, "at": "commit"})
    assert fired(broken) == [("kill", "trainer")]
    assert "trainer was killed by SIGKILL" in broken.output
    assert_nothing_was_lost(resumed(cli, broken), undisturbed)


def test_a_trainer_killed_at_a_checkpoint_goes_on_from_the_one_before(cli, undisturbed):
    # Engines generate the next step already: of weights that no checkpoint holds, so that its groups must not be used.
    broken = disturbed(cli, {"what": "kill", "where": "trainer", "step": 2, "at": "checkpoint"})
    assert fired(broken) == [("kill", "trainer")]
    assert [row["step"] for row in broken.metrics()] == [1, 2, 3], "step 3 was closed before its checkpoint"
    again = resumed(cli, broken)
    assert "at step 3 of 6" in again.output
    assert_nothing_was_lost(again, undisturbed)


@contextmanager
def leased(path: Path) -> Iterator[None]:
    told = signal.signal(signal.SIGIO, signal.SIG_IGN)  # that somebody waits
    try:
        with open(path, "rb") as file:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            yield
    finally:
        signal.signal(signal.SIGIO, told)


def test_a_trainer_killed_while_a_checkpoint_is_written_trains_on_until_then_and_goes_on_from_the_one_before(
    cli, undisturbed
):
    answers_come = cli.work_dir / "answers_come"
    held = {"what": "slow", "where": "engine-0", "step": 2, "until": str(answers_come), "times": 1}
    flags = FLAGS | {"cluster__num_engines": 1, "training__checkpoint_every": 2}
    process = cli.start([*cli.arguments(**flags), "--chaos", write_plan(cli, held)])
    run = cli.wait_for_steps(2)
    cli.wait_for(lambda: newest_whole_version(run / "checkpoints") == 2, "the first checkpoint")
    # Whoever opens a file that is leased waits until the lease is given back, or 45 s.
    half_written = run / "checkpoints" / ".staging-v00000004" / "model.safetensors"
    half_written.parent.mkdir()
    half_written.write_bytes(bytes(100_000))
    with leased(half_written):
        answers_come.touch()
        cli.wait_for_steps(5)  # step 4 is being written all the time
        cli.processes_of(run)["trainer"].kill()
        broken = cli.finish(process)
    assert newest_whole_version(run / "checkpoints") == 2
    again = resumed(cli, broken)
    assert "at step 3 of 6" in again.output
    assert_nothing_was_lost(again, undisturbed)


def test_a_killed_conductor_is_resumed(cli, undisturbed):
    broken = disturbed(cli, {"what": "kill", "where": "conductor", "step": 2, "at": "forward_backward"})
    assert fired(broken) == [("kill", "conductor")]
    assert "conductor was killed by SIGKILL" in broken.output
    assert_nothing_was_lost(resumed(cli, broken), undisturbed)


def test_a_snapshot_torn_for_everybody_ends_the_run_with_the_cause_and_it_is_resumed(cli, undisturbed):
    torn = {"what": "truncate_snapshot", "where": "trainer", "step": 1}
    broken = disturbed(cli, torn, engine__start_deadline_s=10)
    assert fired(broken) == [("truncate_snapshot", "trainer")]
    assert "no engine could serve version 2" in broken.output and "the snapshot is torn" in broken.output
    assert_nothing_was_lost(resumed(cli, broken), undisturbed)


def test_a_full_disk_at_publication_ends_the_run_with_the_cause_and_it_is_resumed(cli, undisturbed, small_disk):
    broken = disturbed(cli, {"what": "disk_full", "where": "trainer", "step": 1}, weights__root=small_disk)
    assert fired(broken) == [("disk_full", "trainer")]
    assert "publishing weights v2" in broken.output and "No space left on device: make room" in broken.output
    still_full = cli.run("train", "--resume", str(broken.run_dir), "--observe.view", "plain")
    assert still_full.returncode == 2 and "has room for" in still_full.output and "make room" in still_full.output
    for ballast in small_disk.rglob("ballast"):
        ballast.unlink()
    assert_nothing_was_lost(resumed(cli, broken), undisturbed)


def test_a_stall_ends_the_run_and_says_who_waited_for_whom(cli):
    stopped_forever = {"what": "stop", "where": "engine-0", "step": 1}
    outcome = disturbed(cli, stopped_forever, cluster__num_engines=1, conductor__stall_deadline_s=15)
    assert fired(outcome) == [("stop", "engine-0")]
    assert outcome.returncode == 1
    assert "nothing has happened for" in outcome.output and "the trainer waits for engine-0" in outcome.output
    dump = (outcome.run_dir / "logs" / "conductor.log").read_text()
    assert "trainer: wait for" in dump and "engine engine-0: " in dump and "has position 0 for" in dump
    assert not cli.processes_of(outcome.run_dir)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of two megabytes, removed afterwards."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True, timeout=60)
