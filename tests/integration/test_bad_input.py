"""Mistakes of the user: one clear line, exit code 2, before any process starts."""

import json

import pytest

BROKEN = '{"prompt": "1 plus 1 is"}\n{"prompt": "1 plus'


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"rollout__group_size": 1}, "rollout.group_size=1 leaves no group to compare with: use at least 2"),
        ({"rollout__group_size": "many"}, "rollout.group_size='many' is not valid"),
        ({"model": "./nowhere"}, "nowhere"),
        ({"task__options": '{"path": "broken.jsonl", "reward": "my_rewards:many_low_bytes"}'}, "broken.jsonl:2"),
        ({"task__options": '{"path": "problems.jsonl", "reward": "my_rewards:nothing"}'}, "my_rewards:nothing"),
        ({"task__options": '{"path": "problems.jsonl", "reward": "no_module:score"}'}, "no_module:score"),
        ({"task__options": '{"path": "long.jsonl", "reward": "my_rewards:many_low_bytes"}'}, "longer than the context"),
        ({"task__name": "subtraction"}, "subtraction"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2_before_anything_starts(cli, work_dir, flags, said):
    (work_dir / "broken.jsonl").write_text(BROKEN)
    (work_dir / "long.jsonl").write_text(json.dumps({"prompt": "x" * 400}) + "\n")
    outcome = cli.train(**flags)
    lines = [line for line in outcome.output.splitlines() if line.strip()]
    assert outcome.returncode == 2, outcome.output
    assert len(lines) == 1 and said in lines[0], outcome.output
    assert outcome.run_dir is None


def test_an_unknown_key_in_a_file_is_named_with_the_key_that_was_meant(cli, work_dir):
    (work_dir / "run.toml").write_text("[rollout]\ngroup_siz = 4\n")
    outcome = cli.run("train", "run.toml")
    assert outcome.returncode == 2
    assert "unknown key rollout.group_siz=4: did you mean group_size?" in outcome.output


def test_an_unknown_flag_is_refused(cli):
    outcome = cli.run("train", "--rollout.group_siz", "4")
    assert outcome.returncode == 2
    assert "--rollout.group_siz" in outcome.output


def test_dry_run_prints_the_configuration_and_the_processes_and_starts_nothing(cli):
    outcome = cli.run(*cli.arguments(rollout__group_size=5), "--dry-run")
    assert outcome.returncode == 0, outcome.output
    assert '"group_size": 5' in outcome.output
    assert "would start: conductor" in outcome.output and "threads" in outcome.output
    assert outcome.run_dir is None
