"""Problems from a file."""

import re
from pathlib import Path

import pytest

from polyrhythm.errors import UserError
from polyrhythm.tasks.dataset import DatasetTask

GOOD = '{"prompt": "1+1=", "answer": 2, "tags": ["a"]}'
CHAT = '{"prompt": [{"role": "user", "content": "hi"}], "answer": 3}'


def write(folder: Path, *lines: str | bytes) -> str:
    path = folder / "problems.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return str(path)


def test_text_and_chat_prompts_are_read_and_other_keys_become_columns(tmp_path: Path) -> None:
    task = DatasetTask(path=write(tmp_path, GOOD, "", CHAT, ""))
    assert task.num_problems == 2
    assert task.problem(0).prompt == "1+1="
    assert task.problem(0).columns == {"answer": 2, "tags": ["a"]}
    assert task.problem(1).prompt == [{"role": "user", "content": "hi"}]
    assert task.problem(1).index == 1


def test_the_prompt_can_have_another_key(tmp_path: Path) -> None:
    task = DatasetTask(path=write(tmp_path, '{"question": "q", "prompt": "p"}'), prompt_key="question")
    assert task.problem(0).prompt == "q"
    assert task.problem(0).columns == {"prompt": "p"}


def test_a_byte_order_mark_and_windows_line_ends_are_no_mistake(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + GOOD.encode() + b"\r", CHAT)
    assert DatasetTask(path=path).num_problems == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", ', "broken JSON"),
        (b'{"prompt": "\xff"}', "broken JSON"),
        ('["prompt"]', "not a JSON object"),
        ('{"text": "a"}', "no key 'prompt', only text: task.options.prompt_key says"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"prompt": 5}', "neither text nor a list of chat messages"),
        ('{"prompt": [{"role": "user"}]}', "needs role and content, this one has role"),
        ('{"prompt": [{"role": "user", "content": 5}]}', "neither text nor a list of chat messages"),
        ('{"prompt": "a", "completions": 1}', "the key 'completions' is taken"),
        ('{"prompt": "a", "answer": 123456789012345678901234567890}', "more than 64 bits"),
    ],
)
def test_a_broken_line_is_named_with_file_and_number(tmp_path: Path, line: str | bytes, message: str) -> None:
    path = write(tmp_path, GOOD, "", line, GOOD)
    with pytest.raises(UserError, match=re.escape(f"{path}:3: ") + ".*" + re.escape(message)):
        DatasetTask(path=path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no problems"):
        DatasetTask(path=write(tmp_path, "", " "))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.options\.path=.*cannot be read: No such file"):
        DatasetTask(path=str(tmp_path / "nothing.jsonl"))
