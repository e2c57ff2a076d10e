"""The command lines of processes that Ray places: they join the run, because its folder may not be on their node."""

from collections.abc import Sequence
from pathlib import Path

from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.config import Config

CONDUCTOR, HOST, PYTHON, TOKEN_FILE = "<conductor>", "<host>", "<python>", "<token file>"
"""Parts that are known when a process is placed: where it finds the conductor, where the conductor finds it, the node's
interpreter, and where the run's token can be read there."""


def joining_command(command: Sequence[str], folder: RunFolder, config: Config) -> list[str]:
    """What `command`, which opens the run's folder, is on another node; any other command stays as it is."""
    _, *arguments = command
    if arguments[-2:] != ["--run", str(folder.path)]:
        return list(command)
    joining = [PYTHON, *arguments[:-2], "--join", CONDUCTOR, "--token-file", TOKEN_FILE]
    if not Path(config.model).exists():  # a name of the hub, or a built-in one, which each node finds by itself
        joining += ["--model", config.model]
    section = config.engine if "engine" in arguments else config.training
    joining += ["--threads", str(section.threads or int(section.resources.get("CPU", 0)))]  # 0: all cores of the node
    if "engine" in arguments:
        joining += ["--host", HOST]
        joining += ["--python", config.engine.python] if config.engine.python else []
    return joining
