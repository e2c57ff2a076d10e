"""`polyrhythm train`: all processes of a run on this machine."""

import argparse
import contextlib
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.errors import UserError

if TYPE_CHECKING:
    from polyrhythm.cluster.run_folder import RunFolder
    from polyrhythm.conductor.engines.cores import CorePlan
    from polyrhythm.config import Config


OWN_FLAGS = ("--dry-run", "--resume", "--chaos")
"""All others are keys of the configuration."""
USAGE = "polyrhythm train [FILE ...] [--key value ...] [--dry-run]"
HELP = f"""\
usage: {USAGE}

  polyrhythm train                         SmolLM2-135M learns to add
  polyrhythm train run.toml --num_steps 9  keys from a file, flags above it
  polyrhythm train runs/X/config.json      the run in runs/X once more
  polyrhythm train --resume runs/X         go on with it where it ended

  FILE          TOML, or the config.json of a run; later ones override earlier
  --dry-run     check everything, print what would run, start nothing
  --resume RUN  go on with the run in this folder from its last checkpoint
  --chaos PLAN  break things on purpose as a TOML file says; see docs/faults.md
"""


class ShowHelp(argparse.Action):
    """argparse's own help of sixty keys begins with fifty lines of usage."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from polyrhythm.config import describe_keys

        print(f"{HELP}\n{describe_keys(min(140, shutil.get_terminal_size().columns))}")
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from polyrhythm.config import add_flags

    parser.usage = USAGE
    parser.add_argument("-h", "--help", action=ShowHelp, nargs=0)
    parser.add_argument("config", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--resume", type=Path, metavar="RUN")
    parser.add_argument("--chaos", type=Path, metavar="PLAN")
    parser.set_defaults(flags=add_flags(parser))


def run(parsed: argparse.Namespace) -> int:
    from polyrhythm.chaos.plan import check_ranks, keep_plan, read_plan
    from polyrhythm.cluster.cores import num_cores, plan_threads
    from polyrhythm.cluster.launcher import make_launcher
    from polyrhythm.cluster.signals import signals_handled
    from polyrhythm.cluster.supervisor import Supervisor
    from polyrhythm.config import load_config, load_resumed_config, read_flags
    from polyrhythm.observe.terminal.view import make_view
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
        return _dry_run(config, threads)
    if config.observe.view != "none":  # the checks import the task and the rewards, and may fetch the model
        print("checking the model, the task and the rewards", flush=True)
    folder = _reopen_run(parsed.resume, config) if parsed.resume else _new_run(config)
    keep_plan(parsed.chaos, folder.path)
    if config.observe.view != "none":
        print(f"run folder: {folder.path}", flush=True)
    with signals_handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C
        view = make_view(config.observe.view, folder.path, folder.first_step)
        outcome = "failed"
        view.starting(config.cluster.num_engines, config.training.num_ranks)
        try:
            with Supervisor(folder, config, threads, make_launcher(config.cluster.kind, folder)) as run:
                run.watch(view)
            outcome = "finished"
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        finally:
            with contextlib.suppress(OSError):  # stdout may be closed while stderr is read, and both may be
                view.close(outcome)
            if outcome == "interrupted" or (outcome == "failed" and newest_whole_version(folder.checkpoints)):
                with contextlib.suppress(OSError):
                    print(_what_is_kept(folder, config), file=sys.stderr)
    return 0


def _what_is_kept(folder: "RunFolder", config: "Config") -> str:
    """One line for the end of a run that has not finished: where `--resume` would go on."""
    from polyrhythm.weights.snapshot import newest_whole_version

    kept, num_finished = newest_whole_version(folder.checkpoints), folder.num_finished_steps()
    if kept:
        later = f" ({num_finished} are finished, but have no checkpoint)" if num_finished > kept else ""
        return f"step {kept} of {config.num_steps} is kept{later}: polyrhythm train --resume {folder.path}"
    if num_finished == 0:
        return "no step was finished: there is nothing to go on from"
    why = "training.checkpoint_every=0 writes none" if config.training.checkpoint_every == 0 else "none was written"
    return f"step {num_finished} of {config.num_steps} was finished, but there is no checkpoint to go on from: {why}"


def _dry_run(config: "Config", threads: "CorePlan") -> int:
    from polyrhythm.cluster.cores import cores_follow_demand, num_cores
    from polyrhythm.cluster.preflight import check_run
    from polyrhythm.weights.pretrained import find_model

    model_dir = find_model(config.model)
    check_run(config, model_dir)
    print(json.dumps(config.model_dump(), indent=2))
    print(f"\nwould start: conductor (1 thread), {config.cluster.num_engines} x engine ({threads.engine} threads each), "
          f"{config.training.num_ranks} x trainer ({threads.trainer} threads each) on {num_cores()} cores"
          f"{', which follow demand' if cores_follow_demand(config) else ''}")  # fmt: skip
    if model_dir is None:
        print(f"would fetch: {config.model}; whether every prompt fits its context is known then")
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
