"""Mistakes of the user: one clear line, exit code 2, before any process starts."""

import json
import os
import shutil
import sys

import pytest

from polyrhythm.cli.main import main
from tests.integration.conftest import Outcome

BROKEN = '{"prompt": "1 plus 1 is"}\n{"prompt": "1 plus'


@pytest.fixture
def run(cli, work_dir, monkeypatch, capfd):
    """The command line in this process, which is quicker: nothing that is refused here starts another one."""
    monkeypatch.chdir(work_dir)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

    def run(*arguments: str) -> Outcome:
        returncode = main(list(arguments))
        written = capfd.readouterr()
        return Outcome(returncode, written.out + written.err, cli.newest_run())

    return run


def said_besides_progress(outcome) -> list[str]:
    lines = [line for line in outcome.output.splitlines() if line.strip()]
    return [line for line in lines if line != "checking the model, the task and the rewards"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"rollout__group_size": 1}, "rollout.group_size=1 leaves no group to compare with: use at least 2"),
        ({"rollout__group_size": "many"}, "rollout.group_size='many' is not valid"),
        ({"model": "./nowhere"}, "nowhere"),
        ({"task__options": '{"path": "broken.jsonl"}'}, "broken.jsonl:2"),
        ({"reward__functions": '["my_rewards:nothing"]'}, "my_rewards:nothing"),
        ({"reward__functions": '["no_module:score"]'}, "no_module:score"),
        ({"task__options": '{"path": "long.jsonl"}'}, "longer than the context"),
        ({"reward__functions": '["my_rewards"]'}, "not of the form module:function"),
        ({"task__options": "{digits = 2}"}, "write JSON"),
        ({"task__name": "subtraction"}, "subtraction"),
        ({"training__learning_rate": "inf"}, "training.learning_rate='inf' is not valid"),
        ({"weights__root": "/proc/nowhere"}, "weights.root='/proc/nowhere' cannot be written"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2_before_anything_starts(cli, run, work_dir, flags, said):
    (work_dir / "broken.jsonl").write_text(BROKEN)
    (work_dir / "long.jsonl").write_text(json.dumps({"prompt": "x" * 400}) + "\n")
    outcome = run(*cli.arguments(**flags))
    (mistake,) = said_besides_progress(outcome)
    assert outcome.returncode == 2, outcome.output
    assert mistake.startswith("polyrhythm: ") and said in mistake
    assert outcome.run_dir is None


def test_an_unknown_key_in_a_file_is_named_with_the_key_that_was_meant(run, work_dir):
    (work_dir / "run.toml").write_text("[rollout]\ngroup_siz = 4\n")
    outcome = run("train", "run.toml")
    assert outcome.returncode == 2
    assert "unknown key rollout.group_siz: did you mean rollout.group_size?" in outcome.output


def test_an_unknown_flag_is_refused_with_the_one_that_was_meant(run):
    outcome = run("train", "--rollout.group_siz", "4")
    assert outcome.returncode == 2
    assert "unknown key rollout.group_siz: did you mean rollout.group_size?" in outcome.output


def test_a_file_that_is_no_text_is_named(run, work_dir):
    (work_dir / "run.toml").write_text("num_steps = 3", encoding="utf-16")
    for arguments in (["run.toml"], ["--chaos", "run.toml"]):
        outcome = run("train", *arguments)
        assert (outcome.returncode, "run.toml is not valid TOML" in outcome.output) == (2, True), outcome.output


def test_a_dry_run_finds_the_mistakes_that_a_run_would(cli, run):
    outcome = run(*cli.arguments(task__options='{"path": "no.jsonl"}'), "--dry-run")
    assert outcome.returncode == 2 and "no.jsonl" in outcome.output


def test_what_is_resumed_must_be_a_run_and_takes_no_other_file(run, work_dir, tiny_model_dir):
    outcome = run("train", "--resume", str(tiny_model_dir))
    assert outcome.returncode == 2 and "is not a run folder: it has no run.json" in outcome.output
    outcome = run("train", "run.toml", "--resume", str(work_dir))
    assert outcome.returncode == 2 and "give changes as flags instead of run.toml" in outcome.output
    outcome = run("engines", "list", "--run", "nowhere")
    assert outcome.returncode == 2 and "is not a run folder" in outcome.output


def test_dry_run_prints_the_configuration_and_the_processes_and_starts_nothing(cli, run):
    outcome = run(*cli.arguments(rollout__group_size=5), "--dry-run")
    assert outcome.returncode == 0, outcome.output
    assert '"group_size": 5' in outcome.output
    assert "would start: conductor" in outcome.output and "threads" in outcome.output
    assert outcome.run_dir is None


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--engine.num", "2", "engine.num was renamed to cluster.num_engines"),
        ("--training.lr", "1e-4", "unknown key training.lr: here it is training.learning_rate"),
        ("--num-generations=8", None, "unknown key num-generations: here it is rollout.group_size"),
        ("--dryrun", None, "unknown argument --dryrun: did you mean --dry-run?"),
        (
            "--training.elastic",
            "true",
            "true: No such file or directory; a key that is true or false is given as --key or --no-key",
        ),
        ("--task.options", "digits", "--task.options cannot be read: write JSON"),
        ("--reward.functions", '["a', "--reward.functions cannot be read: write JSON"),
        ("--engine.max_restarts=2", None, "engine.max_restarts was renamed to cluster.max_restarts"),
        ("--conductor.dispatch", "problem", 'conductor.dispatch = "problem" was renamed'),
        ("--task.options", '{"path": "problems.jsonl", "reward": "a:b"}', "renamed to reward.functions"),
        ("--rollout.top_p", "0.9", "unknown key rollout.top_p: completions drawn from a filtered distribution"),
    ],
)
def test_an_old_or_foreign_name_is_answered_with_the_one_here(cli, run, flag, value, message):
    outcome = run(*cli.arguments(), *([flag] if value is None else [flag, value]), "--dry-run")
    assert outcome.returncode == 2
    assert message in outcome.output and "Traceback" not in outcome.output


@pytest.mark.parametrize("command", ["train", "train --dry-run", "fetch"])
def test_a_model_that_cannot_be_run_is_refused_before_any_process_starts(cli, run, tiny_model_dir, work_dir, command):
    folder = shutil.copytree(tiny_model_dir, work_dir / "recurrent")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    name, *flags = command.split()
    outcome = run("fetch", "recurrent") if name == "fetch" else run(*cli.arguments(model="recurrent"), *flags)
    assert outcome.returncode == 2 and outcome.run_dir is None
    (mistake,) = said_besides_progress(outcome)
    assert mistake.startswith("polyrhythm: model='recurrent' carries a state from token to token")
