"""Ranks that are started by hand join a run, from this machine as from any other, and the weights are those of a run of its own."""

from polyrhythm.cluster.run_folder import RunFolder
from tests.integration.conftest import Cli

FLAGS = {"order": "problem", "training__num_ranks": 2, "num_steps": 3}


def start_by_hand(cli: Cli, **flags) -> tuple:
    before = cli.newest_run()
    process = cli.start(cli.arguments(**(FLAGS | flags)))
    run_dir = cli.wait_for(lambda: (run := cli.newest_run()) != before and run, "a run folder")
    run = RunFolder(run_dir)
    cli.wait_for(lambda: run.processes.is_dir() and run.url("conductor"), "a conductor")
    return process, run


def joining(run: RunFolder, *more: str, url: str = "") -> list[str]:
    return ["trainer", "--join", url or run.url("conductor"), "--token-file", str(run.path / "tokens.json"), *more]


def test_ranks_of_elsewhere_train_the_weights_of_a_run_that_starts_its_own(cli, monkeypatch):
    own = cli.train(**FLAGS)
    assert own.returncode == 0, own.output
    process, run = start_by_hand(cli, training__ranks_elsewhere=2)
    with monkeypatch.context() as environment:
        environment.setenv("RANK", "0")
        environment.setenv("WORLD_SIZE", "2")
        first = cli.start(joining(run))
    second = cli.start(joining(run, "--download", "--model", str(cli.model_dir), "--threads", "1"))
    outcome, said = cli.finish(process), [rank.communicate(timeout=60)[0] for rank in (first, second)]
    assert (outcome.returncode, first.returncode, second.returncode) == (0, 0, 0), (outcome.output, *said)
    assert "2 of 2 ranks join from elsewhere: polyrhythm trainer --join http://127.0.0.1" in outcome.output
    assert "trainer-0 joins the run" in said[0] and "trainer-1 joins the run" in said[1]
    assert outcome.weights() == own.weights()
    assert [row["ranks/num"] for row in outcome.metrics()] == [2, 2, 2]
