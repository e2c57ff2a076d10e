"""An engine of a run: started by the run itself, or joining it from this machine or another."""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polyrhythm.cluster.admin import RunAdmin
from polyrhythm.cluster.cores import num_cores, plan_threads, process_environment
from polyrhythm.cluster.local_processes import announce_to_parent, leave_with_parent
from polyrhythm.cluster.run_folder import SCOPES, SHARED_MEMORY, SHARED_MEMORY_PREFIX, RunFolder
from polyrhythm.config import Config, EngineConfig
from polyrhythm.errors import UserError
from polyrhythm.http.credentials import Credentials
from polyrhythm.messages import RunInfo
from polyrhythm.weights.pretrained import BUILTIN_MODELS, resolve_model

LOOPBACK = "127.0.0.1"
WILDCARDS = ("", "0.0.0.0", "::")
NUM_SNAPSHOTS = 2


def own_engine(run: RunFolder, config: Config, name: str) -> Coroutine[Any, Any, None]:
    """An engine that `polyrhythm train` has started; only the conductor beside it must reach it."""
    from polyrhythm.chaos.engine import fault_middleware
    from polyrhythm.engine.server import run_engine
    from polyrhythm.weights.store import WeightStore

    threads = plan_threads(config, num_cores()).engine
    store = WeightStore(run.store_root)
    return run_engine(
        model_dir=run.model_dir,
        store=store,
        name=name,
        host=LOOPBACK,
        port=0,
        credentials=run.credentials(),
        config=config.engine.model_copy(update={"threads": threads}),
        join_url=run.wait_for_conductor(),
        ready=lambda url: run.announce(name, url),
        fault_middleware=fault_middleware(run.path, name, store),
        lease_s=config.conductor.lease_s,
    )


async def joining_engine(
    url: str,
    *,
    token_file: Path,
    name: str | None,
    model: str | None,
    host: str,
    port: int,
    num_threads: int,
    always_download: bool,
    of_kind: dict[str, Any],
) -> None:
    """Join the run whose conductor listens at `url`, and serve it until it lets this engine go.

    `of_kind` is what of [engine] is another than in the run: its kind, and what goes with that.
    """
    leave_with_parent()
    if host in WILDCARDS:
        raise UserError(
            f"--host {host} says nothing to the conductor: give the address at which it reaches this engine"
        )
    credentials = read_run_credentials(token_file)
    info = RunAdmin(url, credentials["admin"]).info()
    model_dir = _find_model(info, model)
    num_threads = num_threads or num_cores()
    os.environ.update(process_environment(num_threads))
    from polyrhythm.engine.server import run_engine  # imports torch, which reads the environment above
    from polyrhythm.weights.download import DownloadingStore

    name = name or f"{socket.gethostname()}-{os.getpid()}"
    shared_root = None if always_download else Path(info.store_root)
    with tempfile.TemporaryDirectory(
        prefix=f"{SHARED_MEMORY_PREFIX}{os.getpid()}-", dir=_roomy_place(model_dir)
    ) as root:
        await run_engine(
            model_dir=model_dir,
            store=DownloadingStore(Path(root), url, credentials["admin"], info.load_deadline_s, shared_root),
            name=name,
            host=host,
            port=port,
            credentials=credentials,
            config=_engine_config(info, of_kind | {"threads": num_threads}),
            join_url=url,
            ready=lambda here: _say_where(here, name, url),
            lease_s=info.lease_s,
        )


def _say_where(here: str, name: str, url: str) -> None:
    print(f"engine {name} at {here} joins the run at {url}", flush=True)
    announce_to_parent(here)


def _engine_config(info: RunInfo, changes: dict[str, Any]) -> EngineConfig:
    """The run's [engine] with what is another here. Interpreters and servers are those of a machine, so none is taken over."""
    settings = {key: value for key, value in info.engine.items() if key not in ("python", "url")} | changes
    if settings["kind"] != info.engine["kind"]:
        settings.pop("options", None)
    try:
        return EngineConfig(**settings)
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def read_run_credentials(path: Path) -> Credentials:
    """The credentials of a run: its `tokens.json`, or a copy that only the owner can read."""
    try:
        content, mode = json.loads(path.read_text()), path.stat().st_mode
    except OSError as error:
        raise UserError(f"--token-file {path} cannot be read: {error.strerror}") from None
    except ValueError:
        content, mode = None, 0
    if not isinstance(content, dict) or not all(_is_secret(content.get(scope)) for scope in SCOPES):
        raise UserError(f"--token-file {path} is not the tokens.json of a run: copy it from the run's folder")
    if mode & 0o077:
        raise UserError(f"--token-file {path} can be read by others: chmod 600 {path}")
    return Credentials({scope: content[scope] for scope in SCOPES})


def _is_secret(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _find_model(info: RunInfo, model: str | None) -> Path:
    """Shape and tokenizer of the model; its weights come with each version."""
    if model is not None:
        return resolve_model(model)
    if (Path(info.model_dir) / "config.json").is_file():
        return Path(info.model_dir)
    if info.model in BUILTIN_MODELS:
        return resolve_model(info.model)
    raise UserError(
        f"the run's model folder {info.model_dir} is not on this machine: give --model with a copy of it, "
        f"or the hub id it came from (the run calls it {info.model!r})"
    )


def _roomy_place(model_dir: Path) -> Path | None:
    """Shared memory if snapshots fit there twice, else the system's folder for temporary files."""
    num_bytes = NUM_SNAPSHOTS * 2 * sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > num_bytes + 2**30
    return SHARED_MEMORY if fits else None
