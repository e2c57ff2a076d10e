"""The first TOML file of a new user, written for a model and a dataset: short, and every line says why it is there."""

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyrhythm.config import TaskConfig
from polyrhythm.tasks import make_task
from polyrhythm.tokenizer import Tokenizer
from polyrhythm.weights.pretrained import find_model

NUM_LOOKED_AT = 64
MAX_TOKENS = 256
FORMULA = re.compile(r"####|\\|\$")
"""A solution as gsm8k has it, or LaTeX."""
LAST_NUMBER = r"-?\d+(?:\.\d+)?"
OWN_REWARD = "my_rewards.py"
REWARD_SOURCE = '''\
"""What a completion is worth. Called once per problem with all its completions; columns of the data come as lists."""


def score(completions, **columns):
    """Replace this: it prefers short answers. One number for each completion; None where it does not apply."""
    return [-len(text if isinstance(text, str) else text[-1]["content"]) / 1000 for text in completions]
'''


@dataclass(frozen=True)
class Seen:
    """What is known of the problems and of the model."""

    num_problems: int | None
    is_chat: bool
    columns: list[str]
    answer: Any
    """The reference of the first problem; None if there is none."""
    max_tokens: int
    has_chat_template: bool


def look_at(model: str, data: str) -> Seen:
    """UserError, as in `train`, for a model or dataset that cannot be used. A model that is not here is not fetched."""
    task = make_task(TaskConfig(name="dataset", options={"path": data}) if data else TaskConfig())
    num = min(task.num_problems or NUM_LOOKED_AT, NUM_LOOKED_AT)
    problems = [task.problem(index) for index in range(num)]
    first, model_dir = problems[0], find_model(model)
    tokenizer = Tokenizer(model_dir) if model_dir else None
    return Seen(
        num_problems=task.num_problems,
        is_chat=not isinstance(first.prompt, str),
        columns=list(first.columns),
        answer=first.columns.get("answer"),
        max_tokens=MAX_TOKENS if tokenizer is None else min(MAX_TOKENS, tokenizer.context_length // 2),
        has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
    )


def file_for(model: str, data: str, seen: Seen, path: Path) -> str:
    """The text of the file; it needs `my_rewards.py` beside it if the data have no reference answer."""
    parts = [_head(model, path), _task(data, seen), *_prompt(data, seen), *_reward(data, seen), _rest(seen)]
    return "\n\n".join(parts) + "\n"


def needs_own_reward(data: str, seen: Seen) -> bool:
    return bool(data) and seen.answer is None


def _head(model: str, path: Path) -> str:
    return f"""\
# polyrhythm train {path} --dry-run   checks this file and shows what would run
# polyrhythm train {path}             runs it; any key is a flag too: --num_steps 5
# polyrhythm train --help              lists every key; those that are not here have their defaults

model = {_quoted(model)}  # a local folder, a hub id, or the built-in smollm2-135m
num_steps = 100  # of each: problems are answered, answers are scored, the policy is updated
seed = 0  # of the problems' order and of every completion"""


def _task(data: str, seen: Seen) -> str:
    if not data:
        return """\
[task]
name = "addition"  # made up, to begin with; your own data: name = "dataset", options = { path = "problems.jsonl" }"""
    return f"""\
[task]
name = "dataset"  # rows: {seen.num_problems}; the first has the columns {_in_a_comment(seen.columns) or "(prompt alone)"}
options = {{ path = {_quoted(data)} }}  # files, save_to_disk folders, hub ids; also split, prompt_key, answer_key"""


def _prompt(data: str, seen: Seen) -> list[str]:
    if not data or seen.is_chat or not seen.has_chat_template:
        return []
    asked = "Put your final answer on the last line." if seen.answer is not None else "Answer briefly."
    return [
        f"""\
[prompt]
form = "chat"  # the prompts are plain text and the model knows chats: each becomes the message of a user
system = {_quoted(asked)}  # what every chat begins with"""
    ]


def _reward(data: str, seen: Seen) -> list[str]:
    if not data:
        return []  # the task has its own
    if needs_own_reward(data, seen):
        return [
            f"""\
[reward]
functions = ["{OWN_REWARD}:score"]  # the data have no reference answer, so a function of yours must judge"""
        ]
    shown = _quoted(str(seen.answer)[:40])
    if re.fullmatch(LAST_NUMBER, str(seen.answer).strip()):
        return [
            f"""\
[reward]
functions = ["exact_match"]  # 1 for the right answer, else 0; the first one is {shown}
options.exact_match.pattern = '{LAST_NUMBER}'  # what counts is the last number in a completion"""
        ]
    if FORMULA.search(str(seen.answer)) and importlib.util.find_spec("math_verify"):
        return [
            f"""\
[reward]
functions = ["math"]  # 1 for what math-verify finds equal, else 0; the first answer is {shown}"""
        ]
    return [
        f"""\
[reward]
functions = ["exact_match"]  # 1 for the right answer, else 0; the first one is {shown}
options.exact_match.part = "last_line"  # what counts; "math" instead compares formulas (pip install math-verify)"""
    ]


def _rest(seen: Seen) -> str:
    return f"""\
[rollout]
group_size = 8  # completions of each problem, which are compared with one another
groups_per_step = 8  # problems of a step: more is steadier and slower
max_tokens = {seen.max_tokens}  # of a completion; longer ones are cut off there

[training]
learning_rate = 1e-6  # small models stand 1e-5; if the reward falls apart, lower it
checkpoint_every = 20  # steps after which `polyrhythm train --resume RUN` can go on"""


def _in_a_comment(names: list[str]) -> str:
    """A name of somebody's data may hold a line end, and what follows would be a key."""
    return ", ".join(name if name.isprintable() else repr(name) for name in names)


def _quoted(text: str) -> str:
    """A TOML string: JSON's are."""
    return json.dumps(text, ensure_ascii=False)
