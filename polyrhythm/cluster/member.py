"""A member of a run: an engine or a rank, started by the run itself, or joining it from this machine or another."""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from polyrhythm import __version__
from polyrhythm.cluster.admin import RunAdmin, Unreachable
from polyrhythm.cluster.cores import num_cores, plan_threads, process_environment
from polyrhythm.cluster.local_processes import announce_to_parent, leave_with_parent
from polyrhythm.cluster.run_folder import SCOPES, SHARED_MEMORY, SHARED_MEMORY_PREFIX, RunFolder
from polyrhythm.config import Config, EngineConfig
from polyrhythm.devices import DEVICE_VARIABLE
from polyrhythm.devices.plan import VISIBLE_VARIABLES, visible_names
from polyrhythm.errors import UserError
from polyrhythm.http.credentials import Credentials
from polyrhythm.messages import RunInfo
from polyrhythm.setups import setup_of
from polyrhythm.weights.pretrained import BUILTIN_MODELS, resolve_model

if TYPE_CHECKING:
    from polyrhythm.weights.store import WeightStore

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
        config=_computing_in(config.dtype, config.engine.model_copy(update={"threads": threads})),
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
    info, run_config = ask_about_run(url, credentials)
    model_dir = _find_model(info, run_config, model)
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
            store=DownloadingStore(
                Path(root), url, credentials["admin"], run_config.weights.load_deadline_s, shared_root
            ),
            name=name,
            host=host,
            port=port,
            credentials=credentials,
            config=_engine_config(run_config, of_kind | {"threads": num_threads}),
            join_url=url,
            ready=lambda here: _say_where(here, name, url),
            lease_s=run_config.conductor.lease_s,
        )


def _say_where(here: str, name: str, url: str) -> None:
    print(f"engine {name} at {here} joins the run at {url}", flush=True)
    announce_to_parent(here)


@dataclass
class JoinedRank:
    """A rank that has taken its place, and the run as it is seen from here."""

    folder: RunFolder
    config: Config
    rank: int
    store: "WeightStore"


@contextmanager
def joining_rank(
    url: str,
    *,
    token_file: Path,
    rank: int | None,
    model: str | None,
    num_threads: int,
    always_download: bool,
    environment: Mapping[str, str],
) -> Iterator[JoinedRank]:
    """Take a place among the ranks of the run whose conductor listens at `url`: that of `rank`, else of RANK, else a free one.

    The first rank writes, so it must have the run's folder; for the others a folder of this machine stands in for it.
    """
    credentials = read_run_credentials(token_file)
    info, config = ask_about_run(url, credentials)
    rank = _check_rank(config, rank, environment)
    model_dir = _find_model(info, config, model)
    shared = None if always_download else _shared_folder(info, credentials, model_dir)
    if shared is None and info.has_optimizer:
        raise UserError(
            f"this run goes on with what an optimizer remembers, which is in its folder {info.run_dir}: "
            "a rank must be able to read that, at the same path"
        )
    if shared is None and config.training.is_sharded:
        raise UserError(
            f"with training.parallel={config.training.parallel!r} every rank writes its rows of weights and checkpoints: this "
            f"one must have the run's folder {info.run_dir} and its weight store {info.store_root}, at the same paths"
        )
    os.environ.update(process_environment(num_threads or num_cores()) | own_device(config.device, environment))
    from polyrhythm.training.parallel.meeting import (
        ConductorLine,
        take_rank,
    )  # imports torch, which reads the environment
    from polyrhythm.weights.download import DownloadingStore
    from polyrhythm.weights.store import WeightStore

    with tempfile.TemporaryDirectory(prefix="polyrhythm-rank-") as here:
        training = config.training
        name = take_rank(
            ConductorLine(url, credentials["admin"]),
            "" if rank is None else training.rank_name(rank),
            setup_of(model_dir),
            has_run_folder=shared is not None,
        )
        print(f"{name} joins the run at {url}", flush=True)
        store_root, deadline_s = Path(info.store_root), config.weights.load_deadline_s
        writes = training.elastic or training.is_sharded or name == training.rank_name(0)
        if shared is not None and writes:
            store = WeightStore(store_root, keep=config.weights.keep, file_mb=config.weights.file_mb)
        else:
            store = DownloadingStore(
                Path(here) / "weights", url, credentials["admin"], deadline_s, None if always_download else store_root
            )
        folder = shared or RunFolder.stand_in(Path(here), config, credentials, model_dir, info.first_step, url)
        yield JoinedRank(folder, config, training.rank_of(name), store)


def ask_about_run(url: str, credentials: Credentials) -> tuple[RunInfo, Config]:
    """What the conductor at `url` says of its run."""
    try:
        info = RunAdmin(url, credentials["admin"]).info()
    except Unreachable as error:
        raise UserError(
            f"--join {url}: {error}; is the run going on, and is conductor.host an address of its machine?"
        ) from None
    if info.setup.package != __version__:
        raise UserError(
            f"this machine has polyrhythm {__version__}, the run at {url} has {info.setup.package}: install the same"
        )
    return info, Config(**info.config)


def own_device(kind: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Which device a rank has that was started beside others by torchrun: the one of its LOCAL_RANK."""
    device = {DEVICE_VARIABLE: kind}
    if kind != "cpu" and (place := environment.get("LOCAL_RANK", "")).isdigit():
        for variable in VISIBLE_VARIABLES.values():
            names = visible_names(variable, int(place) + 1)
            if int(place) >= len(names):
                raise UserError(f"LOCAL_RANK={place}, but {variable}={','.join(names)} names {len(names)} devices")
            device[variable] = names[int(place)]
    return device


def _check_rank(config: Config, rank: int | None, environment: Mapping[str, str]) -> int | None:
    num_ranks, said = config.training.num_ranks, "--rank"
    world_size = environment.get("WORLD_SIZE", "")
    if world_size and world_size != str(num_ranks):
        raise UserError(f"WORLD_SIZE={world_size}, but the run has training.num_ranks={num_ranks}: make them equal")
    if rank is None and (of_environment := environment.get("RANK", "")):
        said = "RANK"
        if not of_environment.isdigit():
            raise UserError(f"RANK={of_environment} is no number of a rank")
        rank = int(of_environment)
    if rank is not None and (rank < 0 or (rank >= num_ranks and not config.training.elastic)):
        raise UserError(f"{said} {rank}: from 0 to {num_ranks - 1}, see training.num_ranks")
    return rank


def _shared_folder(info: RunInfo, credentials: Credentials, model_dir: Path) -> RunFolder | None:
    """The run's own folder, if it and the weight store are here: the tokens in it are those of the run."""
    folder, store_root = RunFolder(Path(info.run_dir), model_dir), Path(info.store_root)
    try:
        is_same = folder.credentials() == credentials and os.access(folder.path, os.W_OK)
    except (OSError, ValueError):
        return None
    return folder if is_same and (store_root.is_dir() or folder.path in store_root.parents) else None


def _engine_config(run_config: Config, changes: dict[str, Any]) -> EngineConfig:
    """The run's [engine] with what is another here. Interpreters and servers are those of a machine, so none is taken over."""
    of_run = run_config.engine.model_dump()
    settings = {key: value for key, value in of_run.items() if key not in ("python", "url")} | changes
    if settings["kind"] != of_run["kind"]:
        settings.pop("options", None)
    try:
        return _computing_in(run_config.dtype, EngineConfig(**settings))
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def _computing_in(dtype: str, config: EngineConfig) -> EngineConfig:
    """vLLM computes in the number format in which weights come, unless it is told otherwise; the embedded engine, always in fp32."""
    if config.kind != "vllm" or dtype == "auto":
        return config
    return config.model_copy(update={"options": {"dtype": dtype} | config.options})


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


def _find_model(info: RunInfo, config: Config, model: str | None) -> Path:
    """Shape and tokenizer of the model; its weights come with each version."""
    if model is not None:
        return resolve_model(model)
    if (Path(info.model_dir) / "config.json").is_file():
        return Path(info.model_dir)
    if config.model in BUILTIN_MODELS:
        return resolve_model(config.model)
    raise UserError(
        f"the run's model folder {info.model_dir} is not on this machine: give --model with a copy of it, "
        f"or the hub id it came from (the run calls it {config.model!r})"
    )


def _roomy_place(model_dir: Path) -> Path | None:
    """Shared memory if snapshots fit there twice, else the system's folder for temporary files."""
    num_bytes = NUM_SNAPSHOTS * 2 * sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > num_bytes + 2**30
    return SHARED_MEMORY if fits else None
