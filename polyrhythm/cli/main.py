"""The commands. Heavy imports happen inside them, so that `--help` answers at once."""

import argparse
import importlib
import sys
from typing import NamedTuple

from polyrhythm import __version__
from polyrhythm.errors import RunError, UserError

DESCRIPTION = "Reinforcement-learning post-training of language models, strictly on-policy and without waiting."


class Command(NamedTuple):
    """A command's summary, and where it is: `module:add_arguments` and `module:run` of this folder."""

    summary: str
    module: str
    add_arguments: str = "add_arguments"
    run: str = "run"


COMMANDS = {
    "train": Command("train a model: start engines, conductor and trainer on this machine", "train"),
    "fetch": Command("get a built-in model, such as smollm2-135m, into the cache", "fetch"),
    "engine": Command("an inference engine: joining a run (--join), or serving a model folder (--model)", "engine"),
    "conductor": Command("the conductor of a run", "processes", "add_conductor_arguments", "run_conductor"),
    "trainer": Command("one trainer rank of a run", "processes", "add_trainer_arguments", "run_trainer"),
    "engines": Command("list, add, drain or remove the engines of a live run", "engines"),
}


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        parser = _build_parser(chosen=arguments[0] if arguments else "")
        parsed, unknown = parser.parse_known_args(arguments)
        if unknown:
            raise UserError(_explain_unknown(unknown[0], arguments[0]))
        return parsed.run(parsed)
    except (UserError, RunError) as error:
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted: all processes have ended", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `polyrhythm ... | head`
        return 141


def _explain_unknown(argument: str, command: str) -> str:
    if command == "train" and argument.startswith("--"):
        from polyrhythm.config import explain_unknown

        return explain_unknown(argument.removeprefix("--").split("=")[0])
    return f"unknown argument {argument}: `polyrhythm {command} --help` lists what there is"


def _build_parser(chosen: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="polyrhythm", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"polyrhythm {__version__}")
    parser.set_defaults(run=lambda _: parser.print_help() or 0)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.summary, allow_abbrev=name != "train")
        if name == chosen:  # the others need not be imported
            module = importlib.import_module(f"polyrhythm.cli.{command.module}")
            getattr(module, command.add_arguments)(subparser)
            subparser.set_defaults(run=getattr(module, command.run))
    return parser


def _complain(message: str) -> None:
    for line in message.splitlines():
        print(f"polyrhythm: {line}", file=sys.stderr)
