"""Every form of data trains a model: three runs, each over as many forms as fit into one."""

import json
from pathlib import Path

import pytest

from polyrhythm.cli.main import main
from tests.chat_model import save_chat_model
from tests.data_forms import DATA_FORMS, ROWS

REWARD = """
def low(completions, prompts, answer, **columns):
    return [sum(character < "a" for character in text_of(completion)) for completion in completions]

def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]
"""


def samples_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_every_form_of_data_is_trained_on_for_two_steps(cli, work_dir):
    """All of them in one list, and each step is an epoch: every row of every form is in both."""
    paths = []
    for form in sorted(DATA_FORMS):
        (folder := work_dir / form.replace(" ", "_").replace("'", "")).mkdir()
        path = DATA_FORMS[form](folder)["path"]
        paths += [path] if isinstance(path, str) else path
    num_problems = len(DATA_FORMS) * len(ROWS)
    outcome = cli.train(
        num_steps=2, task__options=json.dumps({"path": paths}), rollout__groups_per_step=num_problems,
        rollout__group_size=2, rollout__max_tokens=4, task__epochs=2, observe__samples_per_step=num_problems,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.output
    samples = samples_of(outcome.run_dir)
    assert len(metrics_of(outcome.run_dir)) == 2
    for epoch in (0, 1):
        seen = {sample["problem"]: sample for sample in samples if sample["epoch"] == epoch}
        assert sorted(seen) == list(range(num_problems))
        for index, sample in seen.items():
            row = ROWS[index % len(ROWS)]
            assert (sample["prompt"], sample["columns"]["answer"]) == (row["question"], row["answer"])


def test_chats_are_mixed_by_weight_held_out_and_dropped(cli, work_dir):
    save_chat_model(work_dir / "chat")
    (work_dir / "chat_rewards.py").write_text(REWARD)
    tools = [{"type": "function", "function": {"name": "add"}}]
    chat = [
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": f"{n}?"}]}], "tools": tools}
        for n in range(20)
    ]
    chat[5]["prompt"].append({"role": "assistant", "content": "It is"})
    chat[6]["prompt"][0]["content"] = "x" * 300
    (work_dir / "chat.jsonl").write_text("".join(json.dumps(row | {"solution": "s"}) + "\n" for row in chat))
    (work_dir / "questions.csv").write_text("problem,label\n" + "".join(f"what is {n}?,{n}\n" for n in range(10)))
    values = {
        "model": "chat", "num_steps": 2, "reward__functions": '["chat_rewards:low"]', "task__holdout": 0.2,
        "task__options": '{"path": ["chat.jsonl", "questions.csv"], "weights": [3, 1]}', "prompt__too_long": "drop",
        "prompt__system": "Be kind.", "prompt__template": "{question} Think.", "rollout__groups_per_step": 24,
        "prompt__chat_template_kwargs": '{"enable_thinking": false}', "rollout__group_size": 2, "observe__samples_per_step": 24,
    }  # fmt: skip
    outcome = cli.train(**values)
    assert outcome.returncode == 0, outcome.output
    assert "1 of 30 prompts are longer than 244 tokens: their problems are left out" in outcome.output
    samples = samples_of(outcome.run_dir)
    trained = {sample["problem"] for sample in samples}
    num_chats = sum(sample["problem"] < 20 for sample in samples)
    assert len(samples) == 48 and 24 < num_chats < 48 and 6 not in trained
    for sample in samples:
        assert sample["prompt"][0] == {"role": "system", "content": "Be kind."}
        assert sample["prompt"][1]["content"].endswith("? Think.")

    shown = cli.run("data", *cli.arguments(**values)[1:], "--number", "6", "--holdout")
    assert shown.returncode == 0, shown.output
    held_out = {int(line.split()[2]) for line in shown.output.splitlines() if line.startswith("── problem")}
    assert len(held_out) == 6 and not held_out & trained
    assert "[assistant]<think></think>" in shown.output
    assert "problems: 30, of which 23 are trained on and 6 held out" in shown.output


def test_reasoning_gym_trains_with_its_own_reward(cli):
    dataset = [{"name": "chain_sum", "weight": 2, "max_terms": 2}, "spell_backward"]
    arguments = cli.arguments(
        task__name="reasoning_gym", task__options=json.dumps({"dataset": dataset, "size": 12}), num_steps=2,
        rollout__max_tokens=8, prompt__too_long="truncate",
    )  # fmt: skip
    at = arguments.index("--reward.functions")
    outcome = cli.run(*arguments[:at], *arguments[at + 2 :])
    assert outcome.returncode == 0, outcome.output
    metrics = metrics_of(outcome.run_dir)
    assert len(metrics) == 2 and all(step["reward/excluded"] == 0 for step in metrics)
    kinds = {sample["columns"]["metadata"]["source_dataset"] for sample in samples_of(outcome.run_dir)}
    assert kinds == {"chain_sum", "spell_backward"}


BAD = {
    "empty.jsonl": (b"", "empty.jsonl' holds no problems"),
    "latin.csv": (b"prompt\na\n\xe4\n", "latin.csv:3: not UTF-8"),
    "missing.jsonl": (b'{"text": "a"}', "missing.jsonl:1: no column 'prompt', only text"),
    "seventh.jsonl": (b'{"prompt": "a"}\n' * 6 + b'{"prompt": 7}', "seventh.jsonl:7: the prompt is neither text nor"),
    "table.xlsx": (b"PK", "table.xlsx' ends in '.xlsx'"),
}
TASKS = """
import numpy
from polyrhythm.types import Problem

class Arrays:
    num_problems, reward, stop, correct_above = 3, None, (), None
    def problem(self, index):
        return Problem(index, numpy.array(["hi"]))

class Raising(Arrays):
    def problem(self, index):
        raise LookupError("no table")
"""


@pytest.mark.parametrize("name", [*sorted(BAD), "my_tasks:Arrays", "my_tasks:Raising"])
def test_bad_data_is_one_line_without_a_traceback(cli, work_dir, monkeypatch, capsys, name):
    monkeypatch.chdir(work_dir)
    (work_dir / "my_tasks.py").write_text(TASKS)
    if name in BAD:
        (work_dir / name).write_bytes(BAD[name][0])
        flags, message = {"task__options": json.dumps({"path": name})}, BAD[name][1]
    else:
        flags = {"task__name": name, "task__options": "{}"}
        message = f"problem 0 of task '{name}'"
    assert main([*cli.arguments(**flags), "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
