"""Problems from rows: which column is what, several files, and what is said about a row that is wrong."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polyrhythm.config import TaskConfig
from polyrhythm.errors import UserError
from polyrhythm.rewards.sandbox.calling import OFFERED
from polyrhythm.tasks import ProblemStream, make_task
from polyrhythm.tasks.columns import RESERVED
from polyrhythm.tasks.dataset import DatasetTask
from polyrhythm.types import Problem

GOOD = '{"prompt": "1+1=", "answer": 2, "tags": ["a"]}'
CHAT = '{"prompt": [{"role": "user", "content": "hi"}], "answer": 3}'


def write(folder: Path, *lines: str | bytes, name: str = "problems.jsonl") -> str:
    path = folder / name
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return str(path)


def only_problem(folder: Path, row: dict[str, Any], **options: Any) -> Problem:
    return DatasetTask(path=write(folder, msgspec.json.encode(row)), **options).problem(0)


def test_text_and_chat_prompts_are_read_and_other_keys_become_columns(tmp_path: Path) -> None:
    task = DatasetTask(path=write(tmp_path, GOOD, "", CHAT, ""))
    assert task.num_problems == 2
    assert task.problem(0).prompt == "1+1="
    assert task.problem(0).columns == {"answer": 2, "tags": ["a"]}
    assert task.problem(1).prompt == [{"role": "user", "content": "hi"}]
    assert task.problem(1).index == 1


@pytest.mark.parametrize("name", ["instruction", "messages", "problem", "prompt", "query", "question"])
def test_the_usual_names_of_a_prompt_are_known(tmp_path: Path, name: str) -> None:
    problem = only_problem(tmp_path, {"level": 3, name: "why?"})
    assert problem.prompt == "why?"
    assert problem.columns == {"level": 3} | ({} if name == "prompt" else {name: "why?"})


@pytest.mark.parametrize("name", ["answer", "ground_truth", "label", "solution"])
def test_the_usual_names_of_an_answer_are_known_and_rewards_get_both(tmp_path: Path, name: str) -> None:
    assert only_problem(tmp_path, {"prompt": "p", name: "#### 42"}).columns == {name: "#### 42", "answer": "#### 42"}


def test_verls_layout_is_known(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "2+2?"}], "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"split": "train", "index": 0},
    }  # fmt: skip
    problem = only_problem(tmp_path, row)
    assert problem.prompt == row["prompt"]
    assert problem.columns == {name: value for name, value in row.items() if name != "prompt"} | {"answer": "4"}


def test_keys_that_are_named_win_over_the_usual_ones(tmp_path: Path) -> None:
    row = {"question": "q", "prompt": "p", "answer": "a", "checks": {"exact": "e"}}
    problem = only_problem(tmp_path, row, prompt_key="question", answer_key="checks.exact")
    assert problem.prompt == "q"
    assert problem.columns == {"question": "q", "prompt": "p", "answer": "e", "checks": {"exact": "e"}}


def test_columns_can_be_renamed_and_left_out(tmp_path: Path) -> None:
    row = {"input": "q", "completions": 5, "picture": "…", "checks": {"exact": "e"}}
    renamed = {"input": "prompt", "completions": "num_tries", "picture": "", "checks.exact": "answer"}
    problem = only_problem(tmp_path, row, columns=renamed)
    assert problem.prompt == "q"
    assert problem.columns == {"num_tries": 5, "checks": {"exact": "e"}, "answer": "e"}


def test_content_parts_become_text_and_nulls_of_a_table_are_dropped(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert only_problem(tmp_path, {"prompt": [{"role": "user", "content": parts, "name": None}]}).prompt == [
        {"role": "user", "content": "ab"}
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "no column 'prompt', only text: task.options.prompt_key says where the prompt is"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": 5}, "the prompt is neither text nor a list of messages, but int"),
        ({"prompt": None}, "the prompt is neither text nor a list of messages, but null"),
        ({"prompt": ["a"]}, "message 1 of the prompt is no object with role and content, but str"),
        ({"prompt": [{"role": "user"}]}, "message 1 of the prompt needs role and content, it has role"),
        (
            {"prompt": [{"role": "user", "content": 5}]},
            "message 1 of the prompt has a content that is neither text nor",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "message 1 of the prompt holds a part of type 'image_url': models here read text only",
        ),
        ({"prompt": "a", "completions": 1}, "the column 'completions' is taken"),
    ],
)
def test_a_wrong_row_is_named_with_file_and_number(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    task = DatasetTask(path=write(tmp_path, *[GOOD] * 6, msgspec.json.encode(row), GOOD))
    with pytest.raises(UserError, match=re.escape(f"problems.jsonl:7: {message}")):
        for index in range(task.num_problems):
            task.problem(index)


def test_a_number_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    task = DatasetTask(path=write(tmp_path, '{"prompt": "a", "answer": 123456789012345678901234567890}'))
    with pytest.raises(UserError, match=r"jsonl:1: a number in 'answer' needs more than 64 bits"):
        task.problem(0)


def test_no_column_can_hide_what_every_reward_function_is_given() -> None:
    assert set(OFFERED) <= set(RESERVED)


def test_an_answer_key_that_a_row_lacks_is_named(tmp_path: Path) -> None:
    task = DatasetTask(path=write(tmp_path, '{"prompt": "a", "gold": 1}', '{"prompt": "a"}'), answer_key="gold")
    with pytest.raises(UserError, match=r"jsonl:2: no column 'gold', only .*: task.options.answer_key says"):
        task.problem(1)


def test_files_of_a_list_come_one_after_another_each_with_columns_of_its_own(tmp_path: Path) -> None:
    first = write(tmp_path, '{"prompt": "a"}', '{"prompt": "b"}', name="first.jsonl")
    second = write(tmp_path, '[{"question": "c"}]', name="second.json")
    task = DatasetTask(path=[first, second])
    assert [task.problem(index).prompt for index in range(3)] == ["a", "b", "c"]
    assert task.parts == []


def test_a_pattern_reads_every_file_that_it_matches(tmp_path: Path) -> None:
    for name in ("2", "1", "3"):
        write(tmp_path, f'{{"prompt": "{name}"}}', name=f"part-{name}.jsonl")
    task = DatasetTask(path=str(tmp_path / "part-*.jsonl"))
    assert [task.problem(index).prompt for index in range(3)] == ["1", "2", "3"]
    with pytest.raises(UserError, match="matches no file"):
        DatasetTask(path=str(tmp_path / "nothing-*.jsonl"))


def test_weights_mix_files_exactly_whatever_their_sizes(tmp_path: Path) -> None:
    many = write(tmp_path, *[f'{{"prompt": "many {number}"}}' for number in range(50)], name="many.jsonl")
    few = write(tmp_path, *[f'{{"prompt": "few {number}"}}' for number in range(4)], name="few.jsonl")
    task = make_task(TaskConfig(name="dataset", options={"path": [many, few], "weights": [1, 3]}))
    taken = ProblemStream(task, seed=5).take(0, 1000)
    kinds = Counter(str(problem.prompt).split()[0] for problem in taken)
    assert kinds == {"many": 250, "few": 750}
    # Each part goes through epochs of its own, and no problem comes twice in one.
    assert len({(problem.index, problem.epoch) for problem in taken}) == 1000
    assert Counter(problem.index for problem in taken)[0] == 5


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "are 1 weights for the 2 entries"),
        ([1.0, 0.0], "must all be above 0"),
        ([1.0, 1e-6], "less than one problem in 1000"),
    ],
)
def test_weights_that_mean_nothing_are_refused(tmp_path: Path, weights: list[float], message: str) -> None:
    paths = [write(tmp_path, GOOD, name=f"{number}.jsonl") for number in range(2)]
    with pytest.raises(UserError, match=message):
        ProblemStream(make_task(TaskConfig(name="dataset", options={"path": paths, "weights": weights})), seed=0)
