"""`polyrhythm train`: all processes of a run on this machine."""

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.errors import UserError

if TYPE_CHECKING:
    from polyrhythm.config import Config


OWN_FLAGS = ("--dry-run", "--resume", "--from", "--with-optimizer", "--chaos")
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
  --from RUN    begin with the weights of that run, RUN@20: of its step 20
  --with-optimizer  and with the state of its optimizer
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
    parser.add_argument("--from", dest="earlier", metavar="RUN[@STEP]")
    parser.add_argument("--with-optimizer", action="store_true")
    parser.add_argument("--chaos", type=Path, metavar="PLAN")
    parser.set_defaults(flags=add_flags(parser))


def run(parsed: argparse.Namespace) -> int:
    from polyrhythm.chaos.plan import check_ranks, keep_plan, read_plan
    from polyrhythm.config import load_config, load_resumed_config, read_flags
    from polyrhythm.runs.beginning import find_beginning
    from polyrhythm.runs.carrying_out import carry_out
    from polyrhythm.runs.starting import new_run, reopened_run

    if parsed.resume and parsed.config:
        raise UserError(
            f"--resume goes on with the configuration in the run folder: give changes as flags instead of {parsed.config[0]}"
        )
    if parsed.resume and parsed.earlier:
        raise UserError("--resume goes on with a run and --from begins a new one: give one of them")
    if parsed.with_optimizer and not parsed.earlier:
        raise UserError("--with-optimizer belongs to --from RUN: --resume goes on with the optimizer anyway")
    flags = read_flags(parsed.flags, parsed)
    config = load_resumed_config(parsed.resume, flags) if parsed.resume else load_config(parsed.config, flags)
    if parsed.chaos:
        plan = read_plan(parsed.chaos)
        check_ranks(plan, config.training.rank_names, is_elastic=config.training.elastic)
        if config.cluster.kind == "ray" and any(fault.role == "engine" for fault in plan.fault):
            raise UserError(
                "--chaos: engines that Ray places do not see the plan: use cluster.kind='local' for their faults"
            )
    beginning = find_beginning(parsed.earlier, config, parsed.with_optimizer) if parsed.earlier else None
    if parsed.dry_run:
        return _dry_run(config, beginning.model_dir if beginning else None)
    folder = reopened_run(parsed.resume, config) if parsed.resume else new_run(config, beginning=beginning)
    config = folder.config()
    keep_plan(parsed.chaos, folder.path)
    carry_out(folder, config, how_to_resume=f"polyrhythm train --resume {folder.path}")
    return 0


def _dry_run(config: "Config", model_dir: Path | None) -> int:
    from polyrhythm.cluster.cores import cores_follow_demand, num_cores, plan_threads
    from polyrhythm.cluster.preflight import check_run
    from polyrhythm.cluster.ray.checks import check_ray
    from polyrhythm.devices.plan import describe_plan, plan_devices
    from polyrhythm.weights.pretrained import find_model

    threads, model_dir = plan_threads(config, num_cores()), model_dir or find_model(config.model)
    check_run(config, model_dir)
    print(json.dumps(config.model_dump(), indent=2))
    print(f"\nwould start: conductor (1 thread), {config.cluster.num_engines} x engine ({threads.engine} threads each), "
          f"{config.training.num_ranks} x trainer ({threads.trainer} threads each) on {num_cores()} cores"
          f"{', which follow demand' if cores_follow_demand(config) else ''}")  # fmt: skip
    devices = plan_devices(config)
    if config.cluster.kind == "ray":
        print(*check_ray(config), sep="\n")
    else:
        print(f"device: {devices.kind}", *describe_plan(devices, config, model_dir), sep="\n")
    if model_dir is None:
        print(f"would fetch: {config.model}; whether every prompt fits its context is known then")
    return 0
