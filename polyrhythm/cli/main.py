"""The commands. Heavy imports happen inside them, so that `--help` answers at once."""

import argparse
import contextlib
import difflib
import importlib
import sys

from polyrhythm import __version__
from polyrhythm.errors import RunError, UserError

DESCRIPTION = "Reinforcement-learning post-training of language models, strictly on-policy and without waiting."


EPILOG = """\
polyrhythm train                     SmolLM2-135M learns to add, on this machine
polyrhythm init --data FILE          a commented run.toml for your data
polyrhythm train run.toml --dry-run  what a file would start
polyrhythm train --help              every key of a run
"""

COMMANDS = {
    "train": "train a model: start engines, conductor and trainer on this machine",
    "init": "write a commented configuration for a model and a dataset",
    "data": "show the problems of a run as the model will see them",
    "export": "write a step of a run as a model folder",
    "fetch": "get a model into the cache and check that it can be trained",
    "setup": "make the environment of vLLM, which does not fit into ours",
    "doctor": "check this machine, its devices, a model's memory and a running engine; each problem with its fix",
    "models": "which model architectures run, and why some do not",
    "engine": "serve a model (--model), or help a run of another machine (--join)",
    "engines": "list, add, drain or remove the engines of a live run",
    "ranks": "list, add, drain or remove the elastic training ranks of a live run",
    "conductor": "a process of a run, started by train",
    "trainer": "a rank of a run, started by train, or to help a run of another machine (--join)",
}
"""Each is a file in this folder, with `add_arguments(parser)` and `run(parsed)`."""
HAVE_KEYS = ("train", "data")
"""Those that take every key of a run as a flag; the flags that are not keys are their `OWN_FLAGS`."""


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
        ended = ": all processes have ended" if arguments[:1] == ["train"] else ""
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"\ninterrupted{ended}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `polyrhythm ... | head`
        return 141


def _explain_unknown(argument: str, command: str) -> str:
    if command in HAVE_KEYS and argument.startswith("--"):
        from polyrhythm.config import explain_unknown

        flag, own = argument.split("=")[0], importlib.import_module(f"polyrhythm.cli.{command}").OWN_FLAGS
        if close := difflib.get_close_matches(flag, own, n=1, cutoff=0.8):
            return f"unknown argument {argument}: did you mean {close[0]}?"
        return explain_unknown(flag.removeprefix("--"))
    if command in HAVE_KEYS and argument.lower() in ("true", "false"):
        from polyrhythm.config.loading import FLAG_HAS_NO_VALUE

        return f"unknown argument {argument}: {FLAG_HAS_NO_VALUE}"
    order = "" if argument.startswith("-") else ", and what has no -- goes before what has"
    return f"unknown argument {argument}: `polyrhythm {command} --help` lists what there is{order}"


def _build_parser(chosen: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="polyrhythm", description=DESCRIPTION, epilog=EPILOG, formatter_class=_Help)
    parser.add_argument("--version", action="version", version=f"polyrhythm {__version__}")
    parser.set_defaults(run=lambda _: parser.print_help() or 0)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        has_keys = name in HAVE_KEYS  # so many that it has a help of its own, and an abbreviation could be any of them
        subparser = commands.add_parser(
            name, help=summary, description=summary, allow_abbrev=not has_keys, add_help=not has_keys
        )
        if name == chosen:  # the others need not be imported
            command = importlib.import_module(f"polyrhythm.cli.{name}")
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
    return parser


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=16)


def _complain(message: str) -> None:
    for line in message.splitlines():
        print(f"polyrhythm: {line}", file=sys.stderr)
