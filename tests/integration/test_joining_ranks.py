"""Ranks and engines that are started by hand join a run, from this machine and from others, one of which is cut off in mid-step."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable

import pytest

from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.errors import AnotherFailed, RunError
from tests.integration.conftest import Cli, Outcome, fill_work_dir
from tests.namespaces import Machine, network
from tests.sockets import Listener, watch_listeners

# Completions of some length, so that an engine can be met at work.
FLAGS = {"order": "problem", "training__num_ranks": 2, "num_steps": 6, "rollout__max_tokens": 48}
END_DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def own(tmp_path_factory, tiny_model_dir) -> tuple[Outcome, set[Listener]]:
    """A run that starts two ranks itself, and where all of its processes have listened."""
    cli = Cli(fill_work_dir(tmp_path_factory.mktemp("own")), tiny_model_dir)
    process = cli.start(cli.arguments(**FLAGS))
    listeners = watch_listeners(process)
    outcome = cli.finish(process)
    assert outcome.returncode == 0, outcome.output
    return outcome, listeners


class RunByHand:
    """A run whose other members are started one by one, on this machine or on others."""

    def __init__(self, cli: Cli, **flags):
        self.cli = cli
        self.members: list[subprocess.Popen[str]] = []
        self.process = cli.start(cli.arguments(**(FLAGS | flags)))
        self.folder = RunFolder(cli.wait_for(cli.newest_run, "a run folder"))
        cli.wait_for(lambda: self.folder.processes.is_dir() and self.folder.url("conductor"), "a conductor")

    def __enter__(self) -> "RunByHand":
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.process, *self.members):
            process.kill()

    def start(self, what: str, *arguments: str, on: Machine | None = None) -> subprocess.Popen[str]:
        tokens = str(self.folder.path / "tokens.json")
        joining = [what, "--join", self.folder.url("conductor"), "--token-file", tokens, "--threads", "1", *arguments]
        self.members.append(self.cli.start(joining, within=on.command if on else lambda *words: list(words)))
        return self.members[-1]

    def wait_until(self, condition: Callable, what: str) -> None:
        self.cli.wait_for(lambda: condition(self.folder.admin().status()), what)

    def finish(self) -> Outcome:
        return self.cli.finish(self.process)


def test_nothing_of_a_run_with_two_ranks_listens_outside_loopback(own):
    _, listeners = own
    assert {"conductor", "engine", "trainer"} <= {listener.process for listener in listeners}
    assert not [listener for listener in listeners if listener.is_outside_loopback]


def test_ranks_of_elsewhere_train_the_weights_of_a_run_that_starts_its_own(cli, own, monkeypatch):
    with RunByHand(cli, training__ranks_elsewhere=2) as run:
        check_mistakes(cli, run.folder)
        with monkeypatch.context() as environment:
            environment.setenv("RANK", "0")
            environment.setenv("WORLD_SIZE", "2")
            first = run.start("trainer")
        second = run.start("trainer", "--download", "--model", str(cli.model_dir))
        outcome, said = run.finish(), [rank.communicate(timeout=60)[0] for rank in (first, second)]
    assert (outcome.returncode, first.returncode, second.returncode) == (0, 0, 0), (outcome.output, *said)
    assert "2 of 2 ranks join from elsewhere: polyrhythm trainer --join http://127.0.0.1" in outcome.output
    assert "trainer-0 joins the run" in said[0] and "trainer-1 joins the run" in said[1]
    assert outcome.weights() == own[0].weights()
    assert {row["ranks/num"] for row in outcome.metrics()} == {2}


def check_mistakes(cli: Cli, run: RunFolder) -> None:
    """What is wrong with a rank that joins is one line, the run waits on, and no place is taken."""
    other_tokens, other_model = cli.work_dir / "tokens.json", cli.work_dir / "other"
    other_tokens.write_text('{"admin": "other", "generate": "other"}')
    other_tokens.chmod(0o600)
    shutil.copytree(cli.model_dir, other_model)
    config = json.loads((other_model / "config.json").read_text())
    (other_model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.125}))
    url, tokens = run.url("conductor"), run.path / "tokens.json"
    for arguments, said in (
        (["--join", "http://127.0.0.1:9", "--token-file", tokens], "127.0.0.1:9 cannot be reached"),
        (["--join", url, "--token-file", other_tokens], "does not know this token"),
        (["--join", url, "--token-file", tokens, "--model", other_model], "another one than the run's, by config.json"),
    ):
        refused = cli.run("trainer", *map(str, arguments))
        assert refused.returncode == 2 and said in refused.output, refused.output
        assert len(refused.output.splitlines()) == 1, refused.output


def test_ranks_and_engines_on_other_machines_and_the_engine_is_cut_off_in_mid_step(cli, own):
    with network(2) as net:
        far, farther = net.machines
        with RunByHand(
            cli, conductor__host=net.here, conductor__request_deadline_s=20, training__ranks_elsewhere=2
        ) as run:
            engine = run.start("engine", "--name", "far", "--host", farther.address, "--download", on=farther)
            run.wait_until(lambda status: any(e.name == "far" for e in status.engines), "an engine from elsewhere")
            ranks = [run.start("trainer", on=far), run.start("trainer", "--download", on=far)]
            run.wait_until(lambda status: (status.policy_version or 0) > 0 and busy(status, "far"), "an engine at work")
            farther.cut_off()
            outcome, said = run.finish(), [rank.communicate(timeout=60)[0] for rank in ranks]
            engine.kill()
    assert outcome.returncode == 0, (outcome.output, *said)
    rows = outcome.metrics()
    assert max(row["engines/serving"] for row in rows) == 2 and rows[-1]["engines/serving"] == 1
    assert sum(row["dispatch/retries"] for row in rows) > 0, "what it had went elsewhere"
    assert not any(row["onpolicy/violations"] for row in rows)
    assert outcome.weights() == own[0].weights(), "nothing was lost, nothing twice"


def busy(status, name: str) -> bool:
    return any(engine.name == name and engine.num_in_flight_groups for engine in status.engines)


def test_a_rank_on_another_machine_that_is_cut_off_ends_the_run_by_name_and_what_was_finished_is_kept(cli):
    with network(1) as net:
        (far,) = net.machines
        with RunByHand(
            cli, conductor__host=net.here, conductor__lease_s=12, training__ranks_elsewhere=1, num_steps=1000
        ) as run:
            second = run.start("trainer", "--download", on=far)
            cli.wait_for_steps(2)
            far.cut_off()
            cut_s = time.monotonic()
            outcome, said = run.finish(), second.communicate(timeout=END_DEADLINE_S)[0]
            took_s = time.monotonic() - cut_s
    assert outcome.returncode == 1 and took_s < END_DEADLINE_S
    assert "rank trainer-1 gave no sign of life for" in outcome.output
    assert "is kept" in outcome.output and "train --resume" in outcome.output, outcome.output
    assert second.returncode in (RunError.exit_code, AnotherFailed.exit_code) and "cannot be reached" in said, said
