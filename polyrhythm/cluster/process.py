"""One process of a run on this machine."""

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from polyrhythm.cluster.cores import process_environment
from polyrhythm.cluster.run_folder import RunFolder

KILL_DEADLINE_S = 5.0


@dataclass
class ManagedProcess:
    """A process that was started, and the log it writes to."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    asked_at_s: float | None = None
    """When it was asked to end."""

    @property
    def returncode(self) -> int | None:
        return self.process.poll()

    def ask_to_end(self) -> None:
        """Once; a part that does not listen is killed when it is asked again later."""
        now_s = time.monotonic()
        if self.asked_at_s is None:
            self.asked_at_s = now_s
            if self.returncode is None:
                self.process.send_signal(signal.SIGTERM)
        elif now_s - self.asked_at_s > KILL_DEADLINE_S and self.returncode is None:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(KILL_DEADLINE_S)

    def end(self, deadline_s: float) -> None:
        """Wait for a part that was asked to end, then insist."""
        try:
            self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
        if self.process.stdin:
            self.process.stdin.close()

    def describe_end(self) -> str:
        """How it ended; what it said last, if it failed by itself; where its log is."""
        code = self.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        cause = f": {lines[-1].removeprefix('polyrhythm: ')}" if code > 0 and lines else ""
        return f"{self.name} {how}{cause} (log: {self.log})"


def start_process(folder: RunFolder, name: str, command: list[str], num_threads: int) -> ManagedProcess:
    """Start `polyrhythm <command> --run <folder>`; a part that is started again goes on in the same log."""
    path = folder.logs / f"{name}.log"
    with open(path, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "polyrhythm", *command, "--run", str(folder.path)],
            stdin=subprocess.PIPE, stdout=log, stderr=log, env=process_environment(num_threads),
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then ends the others in order
        )  # fmt: skip
    return ManagedProcess(name, process, path)
