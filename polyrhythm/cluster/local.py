"""All processes of a run on this machine: started, watched, ended together."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.cluster.threads import process_environment
from polyrhythm.conductor.cores import CorePlan
from polyrhythm.config import Config
from polyrhythm.errors import RunError
from polyrhythm.observe.view import View

POLL_S = 0.2
END_DEADLINE_S = 5.0


@dataclass
class Part:
    """One process of the run."""

    name: str
    process: subprocess.Popen[bytes]
    must_stay: bool

    @property
    def returncode(self) -> int | None:
        return self.process.poll()


class LocalRun:
    """`with LocalRun(...) as run: run.watch(view)`. Leaving the block ends every process."""

    def __init__(self, folder: RunFolder, config: Config, threads: CorePlan):
        self.folder = folder
        self.config = config
        self.threads = threads
        self.parts: list[Part] = []

    def __enter__(self) -> "LocalRun":
        try:
            self._start("conductor", ["conductor"], 1)
            self._wait_for_conductor()
            for index in range(self.config.engine.num):
                name = f"engine-{index}"
                self._start(name, ["engine", "--name", name], self.threads.engine)
            self._start("trainer", ["trainer"], self.threads.trainer, must_stay=False)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch(self, view: View) -> None:
        """Until the trainer is done. A part that ends before it is a RunError that names it."""
        while True:
            ended = [part for part in self.parts if part.returncode is not None]
            if any(part.returncode != 0 or part.must_stay for part in ended):
                raise RunError(self._what_happened())
            if ended:
                return
            if status := self._status():
                view.update(status)
            time.sleep(POLL_S)

    def close(self) -> None:
        """Ask every part to end, then insist."""
        for part in self.parts:
            if part.returncode is None:
                part.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + END_DEADLINE_S
        for part in self.parts:
            try:
                part.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                part.process.kill()
                part.process.wait(END_DEADLINE_S)
            if part.process.stdin:
                part.process.stdin.close()
        self.folder.remove_snapshots()

    def _start(self, name: str, command: list[str], num_threads: int, must_stay: bool = True) -> None:
        with open(self.folder.logs / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "polyrhythm", *command, "--run", str(self.folder.path)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=process_environment(num_threads),
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the others in order
            )  # fmt: skip
        self.parts.append(Part(name, process, must_stay))

    def _wait_for_conductor(self) -> None:
        until = time.monotonic() + 60.0
        while self.folder.url("conductor") is None:
            if self.parts[0].returncode is not None or time.monotonic() > until:
                raise RunError(self._what_happened())
            time.sleep(0.02)

    def _status(self) -> dict[str, Any] | None:
        headers = {"Authorization": f"Bearer {self.folder.tokens()['admin']}"}
        request = urllib.request.Request(f"{self.folder.url('conductor')}/status", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=2.0) as response:
                return json.load(response)
        except (urllib.error.URLError, OSError, ValueError):
            return None  # if the conductor is gone, the next look at the processes says so

    def _what_happened(self) -> str:
        """Name the parts that ended, those killed by a signal first: the others usually fell after them."""
        time.sleep(0.5)
        ended = [
            part for part in self.parts if part.returncode not in (None, 0) or (part.must_stay and part.returncode == 0)
        ]
        if not ended:
            return "the conductor did not start in time"
        ended.sort(key=lambda part: (part.returncode or 0) >= 0)
        return "\n".join(self._obituary(part) for part in ended)

    def _obituary(self, part: Part) -> str:
        code = part.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        log = self.folder.logs / f"{part.name}.log"
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        cause = f": {lines[-1].removeprefix('polyrhythm: ')}" if code > 0 and lines else ""
        return f"{part.name} {how}{cause} (log: {log})"
