"""Which vLLM is started and how, and whether it is one that can be used. Mistakes are found before anything starts."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import psutil

from polyrhythm.config import EngineConfig
from polyrhythm.environments import environment
from polyrhythm.errors import UserError

WORKER_FOLDER = Path(__file__).with_name("worker")
EXTENSION = "polyrhythm_worker.WeightsOfARun"
OLDEST_VERSION = (0, 32)
NEEDED_ROUTES = (
    "/collective_rpc", "/health", "/inference/v1/generate", "/metrics", "/pause", "/reset_prefix_cache", "/resume",
    "/update_weight_version",
)  # fmt: skip
FIXED_OPTIONS: dict[str, Any] = {
    "enable-scale-out": True,  # token ids in, token ids and log-probabilities out
    "logprobs-mode": "processed_logprobs",  # of what was drawn from, after the temperature
    "generation-config": "vllm",  # sampling is what a request says, nothing of the model's own
    "worker-extension-cls": EXTENSION,
}
REPLACED_BY = {
    "max-num-seqs": "engine.max_batch",
    "max-model-len": "engine.context_length",
    "model": "model",
    "tokenizer": "model",
    "uds": "engine.url",
    "host": "engine.url",
    "port": "engine.url",
    "api-key": "the socket, which nobody else can open",
}
"""Options of vLLM that are not the user's to give, and what says the same."""
VERSION_DEADLINE_S = 60.0
CPU_BUILD = "+cpu"
KV_MEMORY_SHARE = 0.25


def check_vllm(config: EngineConfig) -> str:
    """The version of the vLLM that would be started; UserError if there is none, or none that can be used."""
    _check_options(config.options)
    python = vllm_python(config)
    asking = [str(python), "-c", "from importlib.metadata import version; print(version('vllm'))"]
    try:
        done = subprocess.run(
            asking, capture_output=True, text=True, timeout=VERSION_DEADLINE_S, env=_without_our_packages()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"engine.python={str(python)!r} cannot be run: {error}") from None
    if done.returncode != 0:
        raise UserError(f"engine.python={str(python)!r} has no vLLM: install it there, or run `polyrhythm setup vllm`")
    version = done.stdout.strip()
    check_version(version, f"engine.python={str(python)!r}")
    return version


def check_version(version: str, where: str) -> None:
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        raise UserError(f"{where} has vLLM {version}: it must be {oldest} or newer, the first that says of every token "
                        "which weights drew it")  # fmt: skip


def check_routes(described: bytes, where: str) -> None:
    """UserError unless a server has every route that is needed; `described` is its /openapi.json."""
    paths = json.loads(described).get("paths", {})
    if missing := [route for route in NEEDED_ROUTES if route not in paths]:
        raise UserError(
            f"vLLM {where} has no route {', '.join(missing)}: start it with VLLM_SERVER_DEV_MODE=1 and "
            f"{' '.join(_flags(FIXED_OPTIONS))}"
        )


def vllm_python(config: EngineConfig) -> Path:
    """The interpreter that has vLLM: `engine.python`, or that of the environment which `polyrhythm setup vllm` makes."""
    if config.python:
        return Path(config.python).expanduser()
    made = environment("vllm")
    if not made.is_made:
        raise UserError(
            'engine.kind="vllm" needs an environment with vLLM: run `polyrhythm setup vllm` (CPU), or install vLLM '
            "somewhere and set engine.python to the interpreter there"
        )
    return made.python


def command_of(config: EngineConfig, version: str, model_dir: Path, socket: Path, context_length: int) -> list[str]:
    """The command line of a private server on `socket`."""
    defaults: dict[str, Any] = {"dtype": "float32", "disable-uvicorn-access-log": True}
    chosen = {_name(key): value for key, value in config.options.items()}
    options = defaults | chosen
    if version.endswith(CPU_BUILD) and "kv-cache-memory-bytes" not in chosen:
        per_token = kv_bytes_per_token(model_dir, num_bytes=4 if options["dtype"] == "float32" else 2)
        num_tokens = config.kv_tokens or config.max_batch * context_length
        affordable = int(psutil.virtual_memory().available * KV_MEMORY_SHARE)
        options["kv-cache-memory-bytes"] = min(num_tokens * per_token, affordable)
    options |= FIXED_OPTIONS | {
        "max-num-seqs": config.max_batch,
        "max-model-len": context_length,
        "uds": str(socket),
    }
    serve = [str(vllm_python(config)), "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir)]
    return [*serve, *_flags(options)]


def variables_of(folder: Path) -> dict[str, str]:
    """The environment of a private server; what the user has set of vLLM's own variables stays."""
    defaults = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would keep a core from the trainer
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return (
        defaults
        | _without_our_packages()
        | {
            "PYTHONPATH": str(WORKER_FOLDER),
            "VLLM_SERVER_DEV_MODE": "1",  # the routes that load weights
            "VLLM_RPC_BASE_PATH": str(folder),
        }
    )


def kv_bytes_per_token(model_dir: Path, num_bytes: int) -> int:
    """What keys and values of a token take in all layers."""
    config = json.loads((model_dir / "config.json").read_text())
    config = config.get("text_config") or config
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    return 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or num_heads) * head_dim * num_bytes


def _check_options(options: dict[str, Any]) -> None:
    for key in options:
        name = _name(key)
        if name in REPLACED_BY:
            raise UserError(f"engine.options has {key!r}, which is not yours to give: use {REPLACED_BY[name]}")
        if name in FIXED_OPTIONS:
            raise UserError(f"engine.options has {key!r}, which must be {FIXED_OPTIONS[name]!r} here: leave it out")


def _flags(options: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in options.items():
        if value is True:
            flags.append(f"--{name}")
        elif value is False:
            flags.append(f"--no-{name}")
        else:
            flags += [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return flags


def _name(key: str) -> str:
    return key.lstrip("-").replace("_", "-")


def _without_our_packages() -> dict[str, str]:
    """Our environment without what leads another interpreter to our packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
