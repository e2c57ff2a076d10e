"""Every built-in reward: one number or None for each completion, whatever the completion is."""

import asyncio
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyrhythm.errors import UserError
from polyrhythm.rewards.kinds import REWARDS, make_reward
from polyrhythm.rewards.kinds.exact_match import ExactMatch
from polyrhythm.rewards.kinds.mathematics import Math
from polyrhythm.rewards.kinds.reward_model import RewardModel
from polyrhythm.user_code import find_kind
from tests.tiny_model import save_tiny_reward_model

# math-verify keeps time with the alarm that would otherwise end a test that hangs.
pytestmark = pytest.mark.timeout(300, method="thread")

OPTIONS: dict[str, dict[str, Any]] = {
    "code": {"sandbox": f"{__name__}:passes_if_it_returns"},
    "length": {"budget": 20},
    "overlong": {"max_tokens": 20, "cache": 5},
    "reward_model": {"path": "the tiny one"},
}
RIGHT = "<think>6 times 7</think><answer>42</answer>"
PROMPT = "What is 6 times 7?"
JUNK = [
    "",
    " \n\t",
    "\x00\ufffd",
    "<answer>",
    "</think><think>",
    "```python\n",
    "$" * 99,
    "\\boxed{" * 50,
    "9" * 400,
    "٣",
    "½",
]


def passes_if_it_returns(code: str, tests: Any) -> list[bool]:
    return [word in code for word in tests]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory) -> Path:
    return save_tiny_reward_model(tmp_path_factory.mktemp("reward_model"))


@pytest.fixture(scope="module", params=sorted(REWARDS))
def reward(request, reward_model):
    options = OPTIONS.get(request.param, {})
    return make_reward(request.param, options | ({"path": str(reward_model)} if "path" in options else {}))


def score(reward: Any, texts: list[Any], as_messages: bool = False, answer: Any = "42") -> list[float | None]:
    """What the reward gives to a group of completions, called as a worker calls it."""
    result = reward(
        prompts=[[{"role": "user", "content": PROMPT}] if as_messages else PROMPT] * len(texts),
        completions=[[{"role": "assistant", "content": text}] for text in texts] if as_messages else texts,
        completion_ids=[list(str(text).encode()) for text in texts],
        finish_reason=["stop"] * len(texts),
        answer=[answer] * len(texts),
        tests=[["return", "42"]] * len(texts),
    )
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def are_rewards(values: Any, num_completions: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == num_completions
        and all(value is None or (type(value) is float and math.isfinite(value)) for value in values)
    )


def test_a_group_of_completions_gets_one_number_for_each(reward):
    texts = [RIGHT, "41", *JUNK]
    values = score(reward, texts)
    assert are_rewards(values, len(texts))
    assert score(reward, texts) == values, "the same again gives the same again"
    assert score(reward, [*texts[1:], texts[0]]) == pytest.approx([*values[1:], values[0]], abs=1e-5), (
        "order is nothing"
    )


def test_messages_are_worth_what_their_text_is(reward):
    texts = [RIGHT, "41", *JUNK]
    values = score(reward, texts, as_messages=True)
    assert are_rewards(values, len(texts))
    if not isinstance(reward, RewardModel):  # it sees the chat template too
        assert values == score(reward, texts)


def test_a_message_of_content_parts_or_without_content_is_no_failure(reward):
    parts = [{"type": "text", "text": "4"}, {"type": "image"}, {"type": "text", "text": "2"}]
    for content in (parts, None):
        values = score(reward, [content], as_messages=True)
        assert are_rewards(values, 1)
        if isinstance(reward, ExactMatch | Math):
            assert values == [float(content is parts)]


def test_a_huge_completion_is_no_failure(reward):
    assert are_rewards(score(reward, ["1 + <answer>$x$ \\boxed{ " * 50_000]), 1)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(), max_size=3), answer=st.text() | st.integers() | st.floats() | st.none())
def test_no_text_and_no_answer_is_a_failure(reward, texts, answer):
    assert are_rewards(score(reward, texts, answer=answer), len(texts))


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("code", {}, "reward.options.code.sandbox is missing"),
        ("code", {"sandbox": "docker"}, "reward.options.code.sandbox='docker' is not a sandbox: use module:name"),
        (
            "code",
            {"sandbox": "no_such_module:run"},
            "reward.options.code.sandbox='no_such_module:run' cannot be imported",
        ),
        ("exact_match", {"part": "second_line"}, "reward.options.exact_match.part='second_line' is wrong"),
        ("format", {"pattern": "("}, "reward.options.format.pattern='(' is wrong: it is no regular expression"),
        (
            "format",
            {"regex": "a"},
            "reward.options.format.regex='a' is not an option of reward 'format': it has pattern",
        ),
        ("length", {"budget": 0}, "reward.options.length.budget=0 is wrong"),
        ("overlong", {"max_tokens": 10}, "reward.options.overlong.cache is missing"),
        (
            "overlong",
            {"max_tokens": 10, "cache": 11},
            "reward.options.overlong is wrong: cache=11 is more than max_tokens=10",
        ),
        ("repetition", {"max_penalty": 1.0}, "reward.options.repetition.max_penalty=1.0 is wrong"),
        (
            "reward_model",
            {"path": "/no/such/folder"},
            "reward.options.reward_model.path='/no/such/folder' is no folder",
        ),
        ("maths", {}, "reward.functions='maths' is not a reward: use code, exact_match"),
    ],
)
def test_a_mistake_in_the_options_names_its_key(name, options, error):
    with pytest.raises(UserError) as mistake:
        make_reward(name, options)
    assert error in str(mistake.value)


def test_the_docs_name_every_built_in_reward_with_every_option():
    table = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text().partition("## Built in")[2]
    rows = {row.split("|")[1].strip(" `"): row for row in table.splitlines() if row.startswith("| `")}
    assert sorted(rows) == sorted(REWARDS)
    for name, row in rows.items():
        options = inspect.signature(find_kind("reward.functions", name, REWARDS, "reward")).parameters
        assert [option for option in options if f"`{option}`" not in row] == [], name
