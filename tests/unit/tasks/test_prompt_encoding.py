"""From problems to token ids, with a chat template that writes down what it was given."""

from pathlib import Path
from typing import Any

import pytest

from polyrhythm.config import Config
from polyrhythm.errors import UserError
from polyrhythm.tasks import PromptText
from polyrhythm.tokenizer import Tokenizer
from polyrhythm.types import Problem
from tests.chat_model import save_chat_model

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


def text_of(model_dir: Path, **values: Any) -> PromptText:
    return PromptText(Tokenizer(model_dir), Config.model_validate({"rollout": {"max_tokens": 16}, **values}))


def seen(text: PromptText, prompt: Any, **columns: Any) -> str:
    return text.decode(text.encode(Problem(0, prompt, columns)))


def test_text_is_as_it_is_and_a_chat_ends_where_the_assistant_begins(model_dir: Path) -> None:
    text = text_of(model_dir)
    assert seen(text, "hi") == "hi"
    assert seen(text, [USER]) == "[user]hi[assistant]"


def test_a_last_message_of_the_assistant_is_continued(model_dir: Path) -> None:
    started = [USER, {"role": "assistant", "content": "Well,"}]
    assert seen(text_of(model_dir), started) == "[user]hi[assistant]Well,"


def test_the_template_gets_its_options_and_the_tools_of_the_problem(model_dir: Path) -> None:
    text = text_of(model_dir, prompt={"chat_template_kwargs": {"enable_thinking": False}})
    assert seen(text, [USER]) == "[user]hi[assistant]<think></think>"
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert seen(text, [USER], tools=tools) == "{tools:add}[user]hi[assistant]<think></think>"
    assert seen(text, [USER], tools='[{"function": {"name": "add"}}]').startswith("{tools:add}")
    for wrong, message in (("add", "is text, but not JSON"), ({"a": 1}, "is dict: give a list of schemas")):
        with pytest.raises(UserError, match=f"problem 0: the column 'tools' {message}"):
            seen(text, [USER], tools=wrong)


def test_many_lengths_are_those_of_each(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyrhythm.tasks.encoding.NUM_TOGETHER", 3)
    text = text_of(model_dir)
    problems = [Problem(index, "é" * index if index % 2 else [USER] * index) for index in range(1, 9)]
    assert list(text.lengths(problems)) == [(problem.index, len(text.encode(problem))) for problem in problems]


def test_a_prompt_that_is_cut_keeps_its_end(model_dir: Path) -> None:
    text = text_of(model_dir, engine={"context_length": 24}, prompt={"too_long": "truncate"})
    assert text.max_prompt_tokens == 8
    assert seen(text, "0123456789") == "23456789"
    assert next(text.lengths([Problem(0, "0123456789")])) == (0, 10)


def test_a_model_without_a_chat_template_is_refused_with_the_fix(model_dir: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(UserError, match=r'no chat template, but a prompt is a list .*prompt\.form = "text"'):
        seen(text_of(tiny_model_dir), [USER])


def test_what_the_template_raises_is_the_users_error(model_dir: Path) -> None:
    with pytest.raises(UserError, match="its chat template refuses the prompt: no role robot"):
        seen(text_of(model_dir), [{"role": "robot", "content": "hi"}])


def test_a_completion_that_leaves_no_room_for_a_prompt_is_refused(model_dir: Path) -> None:
    with pytest.raises(UserError, match=r"rollout.max_tokens=256 leaves no room for a prompt in the context of 256"):
        text_of(model_dir, rollout={"max_tokens": 256})
