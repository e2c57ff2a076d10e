"""What `[prompt]` makes of a problem."""

import re
from typing import Any

import numpy as np
import pytest

from polyrhythm.config import PromptConfig
from polyrhythm.errors import UserError
from polyrhythm.tasks.prompts import check_prompt, form_prompt
from polyrhythm.types import Problem

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}


def formed(prompt: Any, columns: dict[str, Any] | None = None, **config: Any) -> Any:
    return form_prompt(Problem(0, prompt, columns or {}), PromptConfig(**config)).prompt


def test_nothing_happens_unless_it_is_asked_for() -> None:
    for prompt in ("hi", [USER]):
        problem = Problem(3, prompt, {"answer": 1})
        assert form_prompt(problem, PromptConfig()) is problem


def test_a_system_message_or_a_template_makes_a_chat_of_text() -> None:
    assert formed("hi", system="be brief") == [SYSTEM, USER]
    assert formed("hi", template="{question}!") == [{"role": "user", "content": "hi!"}]
    assert formed("hi", form="chat") == [USER]


def test_text_stays_text_if_that_is_asked_for() -> None:
    assert formed("2+2", form="text", template="Question: {prompt}\nAnswer:") == "Question: 2+2\nAnswer:"
    assert formed("2+2", form="text", system="be brief") == "2+2"


def test_a_chat_keeps_its_own_system_message() -> None:
    assert formed([USER], system="be brief") == [SYSTEM, USER]
    own = {"role": "system", "content": "own"}
    assert formed([own, USER], system="be brief") == [own, USER]


def test_the_template_is_put_around_what_the_user_said_last() -> None:
    answer = {"role": "assistant", "content": "hello"}
    started = {"role": "assistant", "content": "Let me"}
    messages = [USER, answer, {"role": "user", "content": "2+2?"}, started]
    assert formed(messages, template="{question} Think.") == [
        USER, answer, {"role": "user", "content": "2+2? Think."}, started,
    ]  # fmt: skip


def test_a_template_may_name_columns_and_braces_that_are_none_of_them_stay() -> None:
    template = r"{question} ({unit}) in \boxed{}, \frac{1}{2}, {{answer}}"
    filled = formed("how far", {"unit": "km", "answer": 5}, form="text", template=template)
    assert filled == r"how far (km) in \boxed{}, \frac{1}{2}, {answer}"


@pytest.mark.parametrize("name", ["answer", "qestion"])
def test_a_placeholder_that_there_is_not_and_the_answer_are_refused(name: str) -> None:
    said = f"prompt.template has {{{name}}}, and there is only {{unit}}, {{question}}, {{prompt}}: use one of them"
    with pytest.raises(UserError, match=re.escape(said)):
        formed("how far", {"unit": "km", "answer": 5}, template="{question} {" + name + "}")


def test_an_array_is_refused_with_the_fix() -> None:
    with pytest.raises(UserError, match=r"here: the prompt is a ndarray of numpy or pandas: .*\.tolist\(\)"):
        check_prompt(np.array([USER]), "here")


def test_a_message_with_tool_calls_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert check_prompt([USER, call], "here")[1] == call | {"content": ""}
