"""`polyrhythm data`: the problems of a run as the model will see them. No process is started."""

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.errors import UserError

if TYPE_CHECKING:
    from polyrhythm.config import Config
    from polyrhythm.tasks import PromptText, RunProblems, Task
    from polyrhythm.types import Problem

OWN_FLAGS = ("--number", "--holdout")
USAGE = "polyrhythm data [FILE ...] [--key value ...] [--number N] [--holdout]"
HELP = f"""\
usage: {USAGE}

  polyrhythm data run.toml               the first problems that the run will meet
  polyrhythm data run.toml --number 20   more of them
  polyrhythm data run.toml --holdout     those that it will never train on

  FILE        TOML, or the config.json of a run; later ones override earlier
  --number N  how many problems are shown
  --holdout   show the problems that are held out

Every key of `polyrhythm train --help` can be given as a flag.
"""
MAX_VALUE_LENGTH = 200


class ShowHelp(argparse.Action):
    """The keys are those of train, and listed there."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(HELP, end="")
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from polyrhythm.config import add_flags

    parser.usage = USAGE
    parser.add_argument("-h", "--help", action=ShowHelp, nargs=0)
    parser.add_argument("config", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--number", type=int, default=3, metavar="N")
    parser.add_argument("--holdout", action="store_true")
    parser.set_defaults(flags=add_flags(parser))


def run(parsed: argparse.Namespace) -> int:
    from polyrhythm.config import load_config, read_flags
    from polyrhythm.tasks import PromptText, choose_problems, make_task, problems_to_check
    from polyrhythm.tokenizer import Tokenizer
    from polyrhythm.weights.pretrained import resolve_model

    if parsed.number < 1:
        raise UserError(f"--number {parsed.number} shows nothing: give at least 1")
    config = load_config(parsed.config, read_flags(parsed.flags, parsed))
    task = make_task(config.task, config.prompt)
    tokenizer = Tokenizer(resolve_model(config.model))
    text = PromptText(tokenizer, config)
    # Shown even if the run would be refused for them.
    lengths = text.lengths(problems_to_check(config, task))
    problems = choose_problems(config, task, [index for index, length in lengths if length > text.max_prompt_tokens])
    chosen = [task.problem(index) for index in problems.held_out[: parsed.number]]
    if parsed.holdout and not chosen:
        raise UserError("--holdout: no problem is held out; task.holdout is the share, such as 0.1")
    for problem in chosen if parsed.holdout else problems.stream.take(0, parsed.number):
        print("\n".join(_show(problem, text)), end="\n\n")
    print("\n".join(_count(config, task, text, problems)))
    if tokenizer.has_chat_template and any(isinstance(problem.prompt, str) for problem in problems.stream.take(0, 1)):
        print('prompts are plain text, though the model has a chat template: prompt.form = "chat" makes them messages')
    return 0


def _show(problem: "Problem", text: "PromptText") -> list[str]:
    """One problem: the prompt's tokens as text, between rulers, and what the rewards are given beside it."""
    from polyrhythm.observe.terminal.text import visible

    ids = text.encode(problem)
    form = "text" if isinstance(problem.prompt, str) else f"chat of {len(problem.prompt)}"
    title = f"── problem {problem.index} ({form}, {len(ids)} tokens) "
    width = min(100, shutil.get_terminal_size().columns)
    # Line by line: what somebody wrote into a dataset must not command the terminal.
    shown = [visible(line) for line in text.show(ids).split("\n")]
    columns = [visible(f"{name} = {_shorten(value)}") for name, value in problem.columns.items()]
    return [title + "─" * max(0, width - len(title)), *shown, "─" * width, *columns]


def _shorten(value: object) -> str:
    written = json.dumps(value, ensure_ascii=False, default=str)
    return written if len(written) <= MAX_VALUE_LENGTH else f"{written[:MAX_VALUE_LENGTH]} …"


def _count(config: "Config", task: "Task", text: "PromptText", problems: "RunProblems") -> list[str]:
    """How many problems there are, and how far the run goes through them."""
    from polyrhythm.tasks import num_needed, say_too_long

    needed = num_needed(config)
    if task.num_problems is None:
        lines = [f"problems: no end; {needed} in {config.num_steps} steps of {config.rollout.groups_per_step}"]
    else:
        epochs = problems.stream.epochs_after(needed)
        lines = [
            f"problems: {task.num_problems}, of which {problems.stream.num_problems} are trained on "
            f"and {len(problems.held_out)} held out",
            f"the run takes {needed} in {config.num_steps} steps of {config.rollout.groups_per_step}: {epochs:.2f} epochs",
        ]
    return [*lines, *say_too_long(config, task, text, len(problems.too_long))]
