"""What `polyrhythm init` writes passes `polyrhythm train --dry-run` as it is."""

import json
import tomllib

import pytest

from polyrhythm.cli.main import main
from polyrhythm.rewards.kinds import make_reward
from tests.tiny_model import save_tiny_model

CHAT = [{"role": "user", "content": "Say a colour."}]
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
DATA = {
    "chat": [{"messages": CHAT, "solution": "Red"}],
    "gsm8k": [{"question": "What is 40 + 2?", "answer": "40 and 2 are\n#### 42"}],
    "none": None,
    "numbers": [{"question": "What is 40 + 2?", "answer": 42}, {"question": "What is 1/2?", "answer": "0.5"}],
    "unscored": [{"prompt": "Tell me a story."}],
    "words": [{"problem": "The capital of France?", "ground_truth": 'Paris, "of course"'}],
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny-chat"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize("kind", sorted(DATA))
def test_the_file_fits_the_data_and_passes_a_dry_run(kind, tmp_path, model_dir, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["init", "--model", str(model_dir)]
    if rows := DATA[kind]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        arguments += ["--data", "rows.jsonl"]
    assert main(arguments) == 0
    text = (tmp_path / "run.toml").read_text()
    keys = [line for line in text.splitlines() if "=" in line and not line.startswith("#")]
    assert all("  # " in line for line in keys), "every line says why it is there"
    values = tomllib.loads(text)
    assert values.get("prompt", {}).get("form") == (
        "chat" if kind in ("gsm8k", "numbers", "unscored", "words") else None
    )
    assert (tmp_path / "my_rewards.py").exists() is (kind == "unscored")
    assert main(["train", "run.toml", "--dry-run"]) == 0
    assert "would start: conductor" in capsys.readouterr().out


def test_names_of_somebodys_columns_stay_in_their_comment(tmp_path, model_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "q", "answer": "a", "x\n[observe]\nview = 'none'\n#": 1})
    )
    assert main(["init", "--model", str(model_dir), "--data", "rows.jsonl"]) == 0
    assert "observe" not in tomllib.loads((tmp_path / "run.toml").read_text())


def test_an_answer_that_the_pattern_would_tear_apart_is_not_looked_for_by_it(tmp_path, model_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "How many?", "answer": "1,234"}))
    assert main(["init", "--model", str(model_dir), "--data", "rows.jsonl"]) == 0
    options = tomllib.loads((tmp_path / "run.toml").read_text())["reward"]["options"]
    assert make_reward("exact_match", options["exact_match"])(completions=["It is\n1,234"], answer=["1,234"]) == [1.0]


def test_a_file_that_is_there_is_left_alone(tmp_path, model_dir, capsys):
    (tmp_path / "run.toml").write_text("num_steps = 3\n")
    assert main(["init", "--model", str(model_dir), "-o", str(tmp_path / "run.toml")]) == 2
    assert "is there already: give another name with -o" in capsys.readouterr().err
    assert (tmp_path / "run.toml").read_text() == "num_steps = 3\n"


def test_data_that_cannot_be_read_are_one_clear_line(tmp_path, model_dir, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--model", str(model_dir), "--data", "nowhere.jsonl"]) == 2
    said = capsys.readouterr().err.strip()
    assert "nowhere.jsonl" in said and "\n" not in said and not (tmp_path / "run.toml").exists()
