"""What `polyrhythm data` writes to a terminal."""

import json

from polyrhythm.cli.main import main
from tests.tiny_model import save_tiny_model


def test_what_somebody_wrote_into_a_dataset_does_not_command_the_terminal(tmp_path, capsys):
    model = save_tiny_model(tmp_path / "tiny")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "one\ntwo\x1b[2J", "answer": "\x9b2J"}))
    options = json.dumps({"path": str(tmp_path / "rows.jsonl")})
    assert main(["data", "--model", str(model), "--task.name", "dataset", "--task.options", options]) == 0
    shown = capsys.readouterr().out
    assert "\none\ntwo�[2J\n" in shown and 'answer = "�2J"' in shown
