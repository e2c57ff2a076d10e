"""The commands. Heavy imports happen inside them, so that `--help` answers at once."""

import argparse
import asyncio
import contextlib
import difflib
import json
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrhythm import __version__
from polyrhythm.errors import RunError, UserError

if TYPE_CHECKING:
    from polyrhythm.cluster.run_folder import RunFolder
    from polyrhythm.config import Config

WIDTH_OF_PIPES = 160
DESCRIPTION = "Reinforcement-learning post-training of language models, strictly on-policy and without waiting."


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
    from polyrhythm.config import all_keys

    name, close = argument.removeprefix("--").split("=")[0], []
    if command == "train":
        close = difflib.get_close_matches(name, all_keys(), n=1)
    meant = f"did you mean --{close[0]}?" if close else f"`polyrhythm {command} --help` lists what there is"
    return f"unknown argument {argument}: {meant}"


def _build_parser(chosen: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="polyrhythm", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"polyrhythm {__version__}")
    parser.set_defaults(run=lambda _: parser.print_help() or 0)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    train = commands.add_parser(
        "train", help="train a model: start engines, conductor and trainer on this machine", allow_abbrev=False
    )
    train.add_argument("config", nargs="*", type=Path, help="TOML files; later ones and flags override earlier ones")
    train.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and the processes, start nothing"
    )
    train.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on with the run in this folder from its last checkpoint"
    )
    train.add_argument(
        "--chaos", type=Path, metavar="PLAN", help="break things on purpose as this TOML file says; see docs/faults.md"
    )
    if chosen == "train":  # building a flag per key takes a moment that other commands need not wait for
        from polyrhythm.config import add_flags

        train.set_defaults(flags=add_flags(train))
    train.set_defaults(run=_train)

    fetch = commands.add_parser("fetch", help="get a built-in model, such as smollm2-135m, into the cache")
    fetch.add_argument("model", help="smollm2-135m, a hub id or a local folder")
    fetch.set_defaults(run=_fetch)

    for name, summary, function in (
        ("engine", "an inference engine: joining a run (--join), or serving a model folder (--model)", _engine),
        ("conductor", "the conductor of a run", _conductor),
        ("trainer", "one trainer rank of a run", _trainer),
    ):
        command = commands.add_parser(name, help=summary)
        command.add_argument("--run", type=Path, dest="run_dir", required=name != "engine", help="the run folder")
        if name == "engine":
            command.add_argument("--join", metavar="URL", help="serve the run whose conductor listens there")
            command.add_argument("--name", help="its name in the run (default: made from host and process)")
            command.add_argument(
                "--model",
                help="serve this model (folder, hub id or built-in name); with --join: where its copy is here",
            )
            command.add_argument(
                "--download", action="store_true", help="with --join: get weights over HTTP, never from a shared folder"
            )
            command.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
            command.add_argument("--port", type=int, default=0, help="port to bind; 0 takes a free one")
            command.add_argument(
                "--token-file", type=Path, help="the token that clients of --model must send; with --join: tokens.json"
            )
            command.add_argument("--threads", type=int, default=0, help="CPU threads; 0 takes all cores")
        elif name == "trainer":
            command.add_argument("--rank", type=int, default=0, help="which of the run's training.num_ranks it is")
        command.set_defaults(run=function)

    engines = commands.add_parser("engines", help="list, add, drain or remove the engines of a live run")
    engines.add_argument("action", choices=["list", "add", "drain", "remove"], help="drain: when its work is done")
    engines.add_argument("name", nargs="?", help="the engine to drain or remove")
    engines.add_argument("--run", type=Path, dest="run_dir", required=True, help="the run folder")
    engines.set_defaults(run=_engines)
    return parser


def _train(parsed: argparse.Namespace) -> int:
    from polyrhythm.chaos import check_ranks, read_plan
    from polyrhythm.cluster.local import LocalRun
    from polyrhythm.cluster.preflight import check_run
    from polyrhythm.cluster.signals import signals_handled
    from polyrhythm.cluster.threads import cores_follow_demand, num_cores, plan_threads
    from polyrhythm.config import load_config, load_resumed_config, read_flags
    from polyrhythm.observe.view import make_view
    from polyrhythm.weights.pretrained import find_model
    from polyrhythm.weights.snapshot import newest_whole_version

    if parsed.resume and parsed.config:
        raise UserError(
            f"--resume goes on with the configuration in the run folder: give changes as flags instead of {parsed.config[0]}"
        )
    flags = read_flags(parsed.flags, parsed)
    config = load_resumed_config(parsed.resume, flags) if parsed.resume else load_config(parsed.config, flags)
    threads = plan_threads(config, num_cores())
    if parsed.chaos:
        check_ranks(read_plan(parsed.chaos), config.training.rank_names)
    if parsed.dry_run:
        check_run(config, find_model(config.model))
        print(json.dumps(config.model_dump(), indent=2))
        print(f"\nwould start: conductor (1 thread), {config.engine.num} x engine ({threads.engine} threads each), "
              f"{config.training.num_ranks} x trainer ({threads.trainer} threads each) on {num_cores()} cores"
              f"{', which follow demand' if cores_follow_demand(config) else ''}")  # fmt: skip
        return 0
    folder = _reopen_run(parsed.resume, config) if parsed.resume else _new_run(config)
    folder.plan_faults(parsed.chaos)
    if config.observe.view != "none":
        print(f"run folder: {folder.path}", flush=True)
    with signals_handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C
        view = make_view(config.observe.view, folder.path)
        outcome = "failed"
        try:
            with LocalRun(folder, config, threads) as run:
                run.watch(view)
            outcome = "finished"
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        finally:
            view.close(outcome)
            if outcome != "finished" and newest_whole_version(folder.checkpoints):
                print(f"go on with it: polyrhythm train --resume {folder.path}", file=sys.stderr)
    return 0


def _new_run(config: "Config") -> "RunFolder":
    from polyrhythm.cluster.preflight import check_run
    from polyrhythm.cluster.run_folder import RunFolder
    from polyrhythm.weights.pretrained import resolve_model

    model_dir = resolve_model(config.model)
    check_run(config, model_dir)
    return RunFolder.create(config, model_dir)


def _reopen_run(run_dir: Path, config: "Config") -> "RunFolder":
    from polyrhythm.cluster.preflight import check_run
    from polyrhythm.cluster.run_folder import RunFolder
    from polyrhythm.weights.snapshot import newest_whole_version

    run = RunFolder(run_dir.resolve())
    first_step = newest_whole_version(run.checkpoints)
    # A run that ended while it saved its model has only that left to do.
    if first_step > config.num_steps or (first_step == config.num_steps and run.trained_model.exists()):
        raise UserError(f"{run_dir} has finished its num_steps={config.num_steps}: give a larger --num_steps to go on")
    check_run(config, run.model_dir)
    run.reopen(config, first_step)
    print(f"going on with {run_dir} {_where(first_step, config.num_steps)}", flush=True)
    return run


def _where(first_step: int, num_steps: int) -> str:
    if first_step == num_steps:
        return "after its last step, to save the model"
    over = ": there is no checkpoint, so it starts over" if first_step == 0 else ""
    return f"at step {first_step + 1} of {num_steps}{over}"


def _fetch(parsed: argparse.Namespace) -> int:
    from polyrhythm.weights.pretrained import resolve_model

    print(resolve_model(parsed.model))
    return 0


def _engine(parsed: argparse.Namespace) -> int:
    if not 0 <= parsed.port <= 65535:
        raise UserError(f"--port {parsed.port}: from 1 to 65535, or 0 for a free one")
    if parsed.threads < 0:
        raise UserError(f"--threads {parsed.threads}: at least 1, or 0 for all cores")
    if parsed.join:
        return _joining_engine(parsed)
    if (parsed.run_dir is None) == (parsed.model is None):
        raise UserError("an engine needs one of --run RUN, --join URL and --model MODEL")
    if parsed.model:
        return _standalone_engine(parsed)
    from polyrhythm.cluster.member import own_engine

    run, config = _join_run(parsed)
    return _serve(own_engine(run, config, parsed.name or "engine-0"))


def _joining_engine(parsed: argparse.Namespace) -> int:
    from polyrhythm.cluster.member import joining_engine

    if parsed.run_dir or not parsed.token_file:
        raise UserError("--join URL goes with --token-file FILE, a copy of the run's tokens.json, and without --run")
    return _serve(
        joining_engine(
            parsed.join.rstrip("/"), token_file=parsed.token_file, name=parsed.name, model=parsed.model,
            host=parsed.host, port=parsed.port, num_threads=parsed.threads, always_download=parsed.download,
        )
    )  # fmt: skip


def _standalone_engine(parsed: argparse.Namespace) -> int:
    from polyrhythm.cluster.standalone import standalone_engine

    return _serve(
        standalone_engine(
            parsed.model, host=parsed.host, port=parsed.port, token_file=parsed.token_file, num_threads=parsed.threads
        )
    )


def _engines(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from polyrhythm.cluster import engines
    from polyrhythm.cluster.run_folder import RunFolder

    run = RunFolder(parsed.run_dir)
    if (parsed.name is None) != (parsed.action in ("list", "add")):
        raise UserError("`engines drain` and `engines remove` need the name of an engine, `list` and `add` need none")
    if parsed.action == "list":
        width = None if sys.stdout.isatty() else WIDTH_OF_PIPES
        engines.list_engines(run, Console(highlight=False, markup=False, width=width))
    elif parsed.action == "add":
        print(f"{engines.add_engine(run)} is being started")
    elif parsed.action == "drain":
        engines.drain_engine(run, parsed.name)
        print(f"{parsed.name} leaves when it has finished what it has")
    else:
        engines.remove_engine(run, parsed.name)
        print(f"{parsed.name} has left the run")
    return 0


def _conductor(parsed: argparse.Namespace) -> int:
    from polyrhythm.cluster.threads import cores_follow_demand, num_cores, plan_threads
    from polyrhythm.conductor.service import run_conductor

    run, config = _join_run(parsed)
    return _serve(
        run_conductor(
            config, run.path, run.model_dir, run.store_root, run.tokens(), port=config.conductor.port,
            ready=lambda url: run.announce("conductor", url),
            cores=plan_threads(config, num_cores()) if cores_follow_demand(config) else None,
            reward_faults=run.faults("reward"),
        )
    )  # fmt: skip


def _trainer(parsed: argparse.Namespace) -> int:
    from polyrhythm.cluster.signals import signals_handled
    from polyrhythm.train import run_trainer

    run, config = _join_run(parsed)
    if not 0 <= parsed.rank < config.training.num_ranks:
        raise UserError(f"--rank {parsed.rank}: from 0 to {config.training.num_ranks - 1}, see training.num_ranks")
    with signals_handled(signal.default_int_handler, signal.SIGTERM):
        run_trainer(run, config, parsed.rank)
    return 0


def _join_run(parsed: argparse.Namespace) -> "tuple[RunFolder, Config]":
    from polyrhythm.cluster.lifeline import hold_lifeline
    from polyrhythm.cluster.run_folder import RunFolder

    hold_lifeline()
    run = RunFolder(parsed.run_dir)
    try:
        return run, run.config()
    except OSError:
        raise UserError(f"--run {parsed.run_dir} is not a run folder: it has no config.json") from None


def _serve(server: Coroutine[Any, Any, None]) -> int:
    """Run a server until SIGTERM or SIGINT cancels it."""

    async def serve() -> None:
        task = asyncio.ensure_future(server)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(serve())
    return 0


def _complain(message: str) -> None:
    for line in message.splitlines():
        print(f"polyrhythm: {line}", file=sys.stderr)
