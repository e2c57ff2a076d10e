"""Engines come and go in the middle of a run, and the weights stay those of the undisturbed run, byte for byte."""

import signal
from pathlib import Path

import pytest

from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.observe.activity import Activity
from polyrhythm.observe.status import EngineView, RunStatus
from tests.integration.conftest import Cli, Outcome, fill_work_dir

NUM_STEPS = 8
HELD_REWARD = """
import time
from pathlib import Path

def many_low_bytes(completions, **columns):
    while Path({hold!r}).exists():
        time.sleep(0.02)
    return [sum(c < "a" for c in text) / max(1, len(text)) for text in completions]
"""


# A step of the tiny model is over before anybody has looked; with this an engine can be seen, and met, at work.
SLOW_ANSWERS = """
[[fault]]
what = "slow"
where = "engine-*"
step = 1
for_s = 0.5
times = 0
"""


class ElasticRun:
    """A live run with slow answers, which stands still in the middle of a step while it is held."""

    def __init__(self, cli: Cli, undisturbed: Outcome, **flags):
        self.cli = cli
        self.undisturbed = undisturbed
        self.hold_file = cli.work_dir / "hold"
        (cli.work_dir / "held_rewards.py").write_text(HELD_REWARD.format(hold=str(self.hold_file)))
        (cli.work_dir / "slow.toml").write_text(SLOW_ANSWERS)
        self.process = cli.start([*cli.arguments(**(FLAGS | flags)), "--chaos", "slow.toml"])
        self.folder = RunFolder(cli.wait_for_steps(1))

    def hold(self) -> None:
        self.hold_file.touch()
        self.cli.wait_for(lambda: self.status().trainer.doing is Activity.WAIT, "a trainer that waits")

    def release(self) -> None:
        self.hold_file.unlink()

    def status(self) -> RunStatus:
        return self.folder.admin().status()

    def engine(self, name: str) -> EngineView | None:
        return next((engine for engine in self.status().engines if engine.name == name), None)

    def wait_for_state(self, name: str, *states: str) -> None:
        def is_there() -> bool:
            engine = self.engine(name)
            return engine is not None and engine.state in states

        self.cli.wait_for(is_there, f"{name} {states}")

    def wait_for_work(self, name: str) -> None:
        self.cli.wait_for(lambda: (engine := self.engine(name)) and engine.num_in_flight_groups, f"work for {name}")

    def finish(self) -> list[dict]:
        outcome = self.cli.finish(self.process)
        assert outcome.returncode == 0, outcome.output
        rows = outcome.metrics()
        assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
        assert not any(row["onpolicy/violations"] for row in rows)
        assert outcome.weights() == self.undisturbed.weights()
        return rows


FLAGS = {
    "order": "problem", "num_steps": NUM_STEPS, "reward__deadline_s": 1000,
    "reward__functions": '["held_rewards:many_low_bytes"]',
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_model_dir) -> Outcome:
    cli = Cli(fill_work_dir(tmp_path_factory.mktemp("undisturbed")), tiny_model_dir)
    (cli.work_dir / "held_rewards.py").write_text(HELD_REWARD.format(hold=str(cli.work_dir / "hold")))
    outcome = cli.train(**FLAGS)
    assert outcome.returncode == 0, outcome.output
    return outcome


def test_a_second_engine_joins_from_another_address_and_the_first_is_removed(cli, undisturbed):
    run = ElasticRun(cli, undisturbed)
    first = cli.processes_of(run.folder.path)["engine-0"]
    run.wait_for_work("engine-0")
    first.suspend()
    run.hold_file.touch()
    url, tokens = run.folder.url("conductor"), run.folder.path / "tokens.json"
    joined = cli.start(
        ["engine", "--join", url, "--token-file", str(tokens), "--name", "second", "--host", "127.0.0.2", "--download"]
    )
    try:
        run.wait_for_state("second", "ready")
        assert run.engine("second").url.startswith("http://127.0.0.2:")
        run.hold()
        stopped_at = run.status().policy_version
        assert run.engine("second").policy_version == stopped_at < NUM_STEPS - 1, "it serves in the same step"
        removed = cli.run("engines", "remove", "engine-0", "--run", str(run.folder.path))
        assert removed.returncode == 0, removed.output
        listed = cli.run("engines", "list", "--run", str(run.folder.path)).output
        last = cli.run("engines", "drain", "second", "--run", str(run.folder.path))
        run.release()
        rows = run.finish()
    finally:
        joined.send_signal(signal.SIGTERM)
        said, _ = joined.communicate(timeout=60)
    assert joined.returncode == 0, said
    assert not first.is_running(), "its process ended though it was stopped"
    assert "second" in listed and "http://127.0.0.2:" in listed and "gone: removed" in listed
    assert last.returncode == 2 and "second is the only engine" in last.output
    assert all(row["engines/serving"] == 1 for row in rows)
    assert not any(row["dispatch/retries"] for row in rows if row["policy_version"] != stopped_at)
    token_values = run.folder.credentials().by_scope.values()
    texts = [said, listed, *(log.read_text() for log in run.folder.logs.iterdir())]
    assert not any(token in text for token in token_values for text in texts)


def test_an_engine_is_added_and_the_first_is_drained_without_losing_anything(cli, undisturbed):
    run = ElasticRun(cli, undisturbed)
    first = cli.processes_of(run.folder.path)["engine-0"]
    run.hold()
    added = cli.run("engines", "add", "--run", str(run.folder.path))
    assert "engine-1 is being started" in added.output
    run.wait_for_state("engine-1", "ready")
    run.release()
    run.wait_for_work("engine-0")
    run.folder.admin().drain("engine-0")
    run.wait_for_state("engine-0", "gone")
    first.wait(60)
    rows = run.finish()
    assert not any(row["dispatch/retries"] or row["engines/lost"] for row in rows)
    assert max(row["engines/serving"] for row in rows) == 2 and rows[-1]["engines/serving"] == 1
    notes = (run.folder.logs / "supervisor.log").read_text()
    assert "engine-0 has left the run" in notes and "started again" not in notes


def test_a_killed_engine_is_started_again_and_costs_no_more_than_its_own_work(cli, undisturbed):
    run = ElasticRun(cli, undisturbed, cluster__num_engines=2)
    first = cli.processes_of(run.folder.path)["engine-0"]
    run.wait_for_work("engine-0")
    first.kill()
    run.hold()
    run.wait_for_state("engine-0", "joining", "loading", "quarantined", "suspect")
    run.wait_for_state("engine-0", "ready")
    run.release()
    rows = run.finish()
    note = (run.folder.logs / "supervisor.log").read_text()
    assert "engine-0 was killed by SIGKILL" in note and "started again, 1 of 3" in note
    assert sum(row["engines/lost"] for row in rows) == 1
    # max_batch 16 and groups of 4: an engine has at most 5 groups in request.
    assert sum(row["dispatch/retries"] for row in rows) <= 5
    assert rows[0]["engines/serving"] == rows[-1]["engines/serving"] == 2
    assert rows[-1]["dispatch/retries"] == 0


def test_a_run_folder_without_a_run_is_said_to_be_one(undisturbed, cli, tmp_path):
    over = cli.run("engines", "list", "--run", str(undisturbed.run_dir))
    assert over.returncode == 2 and "is not running" in over.output
    none = cli.run("engines", "add", "--run", str(Path(tmp_path) / "nowhere"))
    assert none.returncode == 2 and "nowhere" in none.output
