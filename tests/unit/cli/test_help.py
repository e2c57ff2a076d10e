"""What the command line says about itself."""

import importlib

import pytest

from polyrhythm.cli.main import COMMANDS, main
from polyrhythm.cli.train import OWN_FLAGS
from polyrhythm.config.mistakes import all_keys


def help_of(capsys, monkeypatch, *arguments: str, columns: int = 80) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_every_key_is_a_flag_in_the_help_with_its_default(capsys, monkeypatch):
    lines = help_of(capsys, monkeypatch, "train")
    flags = [line.split()[0].removeprefix("--").removeprefix("[no-]") for line in lines if line.startswith("  --")]
    assert [flag for flag in flags if f"--{flag}" not in OWN_FLAGS] == all_keys()
    assert any(line.split()[:2] == ["--rollout.group_size", "8"] for line in lines)
    assert any("longest_first | in_order" in line for line in lines)


def test_the_first_forty_lines_say_how_to_begin_and_fit_a_terminal(capsys, monkeypatch):
    lines = help_of(capsys, monkeypatch, "train")
    first = "\n".join(lines[:40])
    for said in (
        "polyrhythm train run.toml",
        "config.json",
        "--resume",
        "--dry-run",
        "--model",
        "--task.name",
    ):
        assert said in first
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_a_file_and_explains_itself(capsys, monkeypatch, command):
    module = importlib.import_module(f"polyrhythm.cli.{command}")
    assert callable(module.add_arguments) and callable(module.run)
    assert any(f"polyrhythm {command}" in line for line in help_of(capsys, monkeypatch, command))


def test_a_flag_without_its_value_does_not_bury_the_cause_in_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--num_steps"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        "polyrhythm train: error: argument --num_steps: expected one argument"
    ]
