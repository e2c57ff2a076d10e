"""How a process of a run is started, wherever that is. Each kind of launcher is one file, found by `cluster.kind`.

launcher = make_launcher(config.cluster.kind, folder)
engine = launcher.start(ProcessSpec("engine-0", "engine", command_of(folder, "engine", "--name", "engine-0"), 2))
engine.ask_to_end()
engine.end(deadline_s=5.0)
"""

import importlib
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.errors import AnotherFailed, UserError

LAUNCHERS = {
    "local": "polyrhythm.cluster.local_processes:LocalLauncher",
    "ray": "polyrhythm.cluster.ray.launcher:RayLauncher",
}


@dataclass(frozen=True)
class ProcessSpec:
    """What to start: its name in the run, what it is, its command line, its threads, and what it is told besides."""

    name: str
    role: Literal["conductor", "engine", "trainer"]
    command: list[str]
    num_threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    """Which device it is given."""


class RunProcess(Protocol):
    """A process that a launcher has started. No method waits longer than its deadline."""

    @property
    def name(self) -> str: ...

    @property
    def log(self) -> Path:
        """What it has written to stdout and stderr; a process that is started again appends to it."""
        ...

    @property
    def returncode(self) -> int | None:
        """None while it runs; the exit code; minus the number of the signal that killed it."""
        ...

    def ask_to_end(self) -> None:
        """Send SIGTERM the first time. A process that ignores it is killed when it is asked again some seconds later."""
        ...

    def kill(self) -> None:
        """End it now, even if it is stopped. It has ended when this returns, unless the kernel holds it: that is logged."""
        ...

    def end(self, deadline_s: float) -> None:
        """Wait for a process that was asked to end, and kill it at the deadline."""
        ...

    def describe_end(self) -> str:
        """One line: how it ended, its last words if it failed by itself, and where its log is."""
        ...


class Launcher(Protocol):
    """Starts processes of one run. They end with the supervisor that started them, however that ends."""

    def start(self, spec: ProcessSpec) -> RunProcess: ...

    def close(self) -> None:
        """Called when the processes have ended: what the launcher itself has started ends, too."""
        ...


def make_launcher(kind: str, folder: RunFolder) -> Launcher:
    """The launcher that `cluster.kind` names, for the run in `folder`."""
    module, _, name = LAUNCHERS[kind].partition(":")
    return getattr(importlib.import_module(module), name)(folder)


def command_of(folder: RunFolder, *arguments: str) -> list[str]:
    """The command line of a process of the run in `folder`."""
    return [sys.executable, "-m", "polyrhythm", *arguments, "--run", str(folder.path)]


def describe_end(name: str, returncode: int, log: Path) -> str:
    """What RunProcess.describe_end says of a process that has ended by itself or by a signal."""
    how = (
        f"was killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"ended with exit code {returncode}"
    )
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    cause = f": {lines[-1].removeprefix('polyrhythm: ')}" if returncode > 0 and lines else ""
    return f"{name} {how}{cause} (log: {log})"


def failed_after_another(process: RunProcess) -> bool:
    """Whether it ended only because another process of the run did."""
    return process.returncode == AnotherFailed.exit_code


def failed_by_mistake(process: RunProcess) -> bool:
    """Whether it ended by a mistake of the user, which starting it again cannot mend."""
    return process.returncode == UserError.exit_code
