"""The folder of a run: what every process of it needs to know, and what it leaves behind."""

import fcntl
import itertools
import json
import math
import os
import secrets
import shutil
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from polyrhythm.cluster.admin import RunAdmin, Unreachable
from polyrhythm.conductor.steps.journal import Journal
from polyrhythm.config import Config, read_saved_config, save_config
from polyrhythm.devices.memory import snapshot_bytes
from polyrhythm.errors import AnotherFailed, UserError
from polyrhythm.http.credentials import Credentials

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_PREFIX = "polyrhythm-"
SCOPES = ("generate", "admin")
ENGINE, RANK = "engine", "trainer"
"""With which the names of engines and of ranks begin."""
CREDENTIALS_FILE = "tokens.json"
CONDUCTOR_DEADLINE_S = 600.0
"""It reads the data first, and measures every prompt if some may have to be dropped: a minute for 300,000. That it has failed
is noticed at once."""


class RunFolder:
    """Paths and small files of one run. Made once by `create`, opened by name in every process.

    Whoever creates or reopens one has it alone, until the end of the process or of a `with` block.
    """

    def __init__(self, path: Path, model_dir: Path | None = None):
        """`model_dir`: where the run's model is on this machine, if it is not where the folder says."""
        self.path = path
        self._model_dir = model_dir
        self.logs = path / "logs"
        self.processes = path / "processes"
        self.requests = path / "requests"
        self.checkpoints = path / "checkpoints"
        self.trained_model = path / "model"
        self.initial_model = path / "initial_model"
        self.initial_optimizer = path / "initial_optimizer"

    @classmethod
    def create(cls, config: Config, model_dir: Path) -> "RunFolder":
        run = cls.reserve(config.output_dir)
        run.fill(config, model_dir)
        return run

    @classmethod
    def reserve(cls, output_dir: str) -> "RunFolder":
        """An empty folder that is named by time; it becomes a run when it is filled."""
        parent = Path(output_dir)
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        for suffix in ["", *(f"-{number}" for number in range(2, 100))]:
            run = cls((parent / f"{stamp}{suffix}").resolve())
            try:
                run.path.mkdir(mode=0o700, parents=True)
                break
            except FileExistsError:
                continue
            except OSError as error:
                raise UserError(f"output_dir={output_dir!r} cannot be written: {error.strerror}") from None
        else:
            raise UserError(f"{parent / stamp} and its successors exist already")
        run._lock()
        return run

    def fill(self, config: Config, model_dir: Path) -> None:
        """What the processes of the run need to know."""
        self.logs.mkdir()
        self.processes.mkdir()
        save_config(config, self.path / "config.json")
        self._write_secret(CREDENTIALS_FILE, {scope: secrets.token_urlsafe(32) for scope in SCOPES})
        try:
            store_root = _choose_store_root(config, self.path, model_dir)
        except UserError:
            self.remove()
            raise
        self._write("run.json", {"model_dir": str(model_dir), "store_root": str(store_root), "first_step": 0})

    @classmethod
    def stand_in(
        cls, path: Path, config: Config, credentials: Credentials, model_dir: Path, first_step: int, url: str
    ) -> "RunFolder":
        """A folder of this machine with what a rank needs to know of a run whose own folder is elsewhere."""
        run = cls(path)
        run.processes.mkdir()
        save_config(config, path / "config.json")
        run._write_secret(CREDENTIALS_FILE, dict(credentials.by_scope))
        known = {"model_dir": str(model_dir), "store_root": str(path / "weights"), "first_step": first_step}
        run._write("run.json", known)
        run.announce("conductor", url)
        return run

    def remove(self) -> None:
        """Of a run that never began."""
        shutil.rmtree(self.path, ignore_errors=True)

    def reopen(self, config: Config, first_step: int) -> None:
        """Make the folder of an ended run ready to go on at `first_step`; what was logged beyond it will be made again."""
        self._lock()
        for stale in (*self.processes.glob("*"), *self.requests.glob("*")):
            stale.unlink()
        for name in ("metrics.jsonl", "samples.jsonl"):
            _keep_first_steps(self.path / name, first_step)
        Journal(self.path / "journal").forget_groups_after(first_step)
        save_config(config, self.path / "config.json")
        store_root = _choose_store_root(config, self.path, self.model_dir)
        self._write(
            "run.json", {"model_dir": str(self.model_dir), "store_root": str(store_root), "first_step": first_step}
        )

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        """The run is over: whoever comes next may go on with it."""
        self._lock_file.close()

    def config(self) -> Config:
        return read_saved_config(self.path / "config.json")

    def admin(self, deadline_s: float = 10.0) -> RunAdmin:
        """The conductor of this run, if it runs."""
        url = self.url("conductor")
        if url is None:
            raise Unreachable(f"the run in {self.path} has no conductor yet")
        return RunAdmin(url, self.credentials()["admin"], deadline_s)

    def credentials(self) -> Credentials:
        return Credentials(self._read(CREDENTIALS_FILE))

    def num_finished_steps(self) -> int:
        """Of the whole run: what it logged before it was resumed is still there."""
        metrics = self.path / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    @property
    def model_dir(self) -> Path:
        return self._model_dir or Path(self._read("run.json")["model_dir"])

    @property
    def store_root(self) -> Path:
        return Path(self._read("run.json")["store_root"])

    @property
    def first_step(self) -> int:
        return self._read("run.json")["first_step"]

    def announce(self, name: str, url: str, pid: int = 0) -> None:
        """Called once a server listens: by its process, or by whoever has started process `pid` elsewhere."""
        self._write(f"processes/{name}.json", {"pid": pid or os.getpid(), "url": url})

    def request(self, kind: str, taken: set[str]) -> Path:
        """Ask the supervisor of this run for one more process of a kind; the file that asks is gone once it has heard."""
        self.requests.mkdir(exist_ok=True)
        while True:
            path = self.requests / free_name(kind, taken)
            try:
                path.touch(exist_ok=False)
                return path
            except FileExistsError:
                taken = {*taken, path.name}

    def take_requests(self, kind: str) -> list[str]:
        names = sorted(path.name for path in self.requests.glob(f"{kind}-*"))
        for name in names:
            (self.requests / name).unlink()
        return names

    def forget_announcement(self, name: str) -> None:
        (self.processes / f"{name}.json").unlink(missing_ok=True)

    def wait_for_conductor(self) -> str:
        """The address of the conductor. All processes of a run are started together, so it may not listen yet."""
        until = time.monotonic() + CONDUCTOR_DEADLINE_S
        while time.monotonic() < until:
            if url := self.url("conductor"):
                return url
            time.sleep(0.02)
        raise AnotherFailed(f"the conductor did not listen within {CONDUCTOR_DEADLINE_S:.0f} s")

    def url(self, name: str) -> str | None:
        try:
            return self._read(f"processes/{name}.json")["url"]
        except FileNotFoundError:
            return None

    def pid(self, name: str) -> int:
        """The process that announced itself under this name."""
        return self._read(f"processes/{name}.json")["pid"]

    def remove_snapshots(self) -> None:
        """Snapshots in shared memory end with the run; the trained model is in the run folder."""
        if self.store_root.parent == SHARED_MEMORY:
            shutil.rmtree(self.store_root, ignore_errors=True)

    def _lock(self) -> None:
        """The folder belongs to this process until it ends, in whatever way."""
        try:
            self._lock_file = open(self.path / "lock", "w")  # noqa: SIM115
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.path} is a run that is still going on: stop it before it is resumed") from None

    def _write(self, name: str, content: dict[str, Any]) -> None:
        beside = self.path / f"{name}.new"
        beside.write_text(json.dumps(content) + "\n")
        os.replace(beside, self.path / name)

    def _write_secret(self, name: str, content: dict[str, str]) -> None:
        descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            json.dump(content, file)

    def _read(self, name: str) -> dict[str, Any]:
        return json.loads((self.path / name).read_text())


def free_name(kind: str, taken: set[str]) -> str:
    return next(name for number in itertools.count() if (name := f"{kind}-{number}") not in taken)


def _keep_first_steps(path: Path, num_steps: int) -> None:
    if path.exists():
        # Bytes, because text would also be split at the line separators that a model may write.
        kept = [line for line in path.read_bytes().split(b"\n") if _step_of(line) <= num_steps]
        beside = path.with_name(f"{path.name}.new")
        beside.write_bytes(b"".join(line + b"\n" for line in kept))
        os.replace(beside, path)


def _step_of(line: bytes) -> float:
    """Infinite for a line that is half written: the run may have been killed while it wrote."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf


def _choose_store_root(config: Config, run_path: Path, model_dir: Path) -> Path:
    needed = (config.weights.keep + 1) * snapshot_bytes(config, model_dir)  # one is being written
    if config.weights.root:
        root = Path(config.weights.root).resolve() / run_path.name
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"weights.root={config.weights.root!r} cannot be written: {error.strerror}") from None
        there = sum(file.stat().st_size for file in root.rglob("*.safetensors"))  # of a run that is resumed
        if (room := shutil.disk_usage(root).free + there) < needed:
            raise UserError(
                f"weights.root={config.weights.root!r} has room for {room / 1e6:,.1f} MB, and {config.weights.keep + 1} "
                f"snapshots of the model take {needed / 1e6:,.1f}: make room or choose another folder"
            )
        return root
    _remove_orphans()
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > needed + 2**30:
        root = SHARED_MEMORY / f"{SHARED_MEMORY_PREFIX}{os.getpid()}-{run_path.name}"
        root.mkdir(mode=0o700)
        return root
    return run_path / "weights"


def _remove_orphans() -> None:
    """Snapshots whose run was killed without a chance to clean up."""
    for folder in SHARED_MEMORY.glob(f"{SHARED_MEMORY_PREFIX}*-*"):
        pid = folder.name.removeprefix(SHARED_MEMORY_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
