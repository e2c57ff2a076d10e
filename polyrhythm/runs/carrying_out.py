"""A run from its folder to its end: the processes, what the user sees of them, and what is kept if it does not finish."""

import contextlib
import signal
import sys

from polyrhythm.cluster.cores import num_cores, plan_threads
from polyrhythm.cluster.launcher import make_launcher
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.cluster.signals import signals_handled
from polyrhythm.cluster.supervisor import Supervisor
from polyrhythm.config import Config
from polyrhythm.devices.plan import describe_plan, plan_devices
from polyrhythm.observe.terminal.view import make_view
from polyrhythm.weights.snapshot import newest_whole_version


def carry_out(folder: RunFolder, config: Config, how_to_resume: str) -> None:
    """Until the run has finished; a run that does not is a UserError, a RunError or KeyboardInterrupt.

    No process is left by then, and the folder belongs to nobody. `how_to_resume` is what a user would type.
    """
    if config.observe.view != "none":
        print(f"run folder: {folder.path}", flush=True)
    threads, devices = plan_threads(config, num_cores()), plan_devices(config)
    if config.observe.view != "none":
        print(*describe_plan(devices, config, folder.model_dir), sep="\n", flush=True)
    with folder, signals_handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C
        view = make_view(config.observe.view, folder.path, folder.first_step)
        outcome = "failed"
        view.starting(config.cluster.num_engines, config.training.num_ranks)
        try:
            with contextlib.closing(make_launcher(config.cluster.kind, folder)) as launcher:
                with Supervisor(folder, config, threads, launcher, devices) as run:
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
                    print(_what_is_kept(folder, config, how_to_resume), file=sys.stderr)


def _what_is_kept(folder: RunFolder, config: Config, how_to_resume: str) -> str:
    """One line for the end of a run that has not finished: where it would go on."""
    kept, num_finished = newest_whole_version(folder.checkpoints), folder.num_finished_steps()
    if kept:
        later = f" ({num_finished} are finished, but have no checkpoint)" if num_finished > kept else ""
        return f"step {kept} of {config.num_steps} is kept{later}: {how_to_resume}"
    if num_finished == 0:
        return "no step was finished: there is nothing to go on from"
    why = "training.checkpoint_every=0 writes none" if config.training.checkpoint_every == 0 else "none was written"
    return f"step {num_finished} of {config.num_steps} was finished, but there is no checkpoint to go on from: {why}"
