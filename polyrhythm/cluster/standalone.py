"""An engine without a run: it serves one model to anybody who may ask."""

import ipaddress
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from polyrhythm.cluster.cores import num_cores, process_environment
from polyrhythm.config import EngineConfig
from polyrhythm.errors import UserError
from polyrhythm.http.credentials import Credentials
from polyrhythm.tokenizer import Tokenizer
from polyrhythm.weights.pretrained import resolve_model

_MIN_CREDENTIAL_LENGTH = 16


def standalone_engine(
    model: str, *, host: str, port: int, token_file: Path | None, num_threads: int
) -> Coroutine[Any, Any, None]:
    """The server, ready to be awaited; a mistake in what was asked for is a `UserError` before anything is loaded."""
    if token_file is None and not is_loopback(host):
        raise UserError(
            f"--host {host} is open to other machines: give --token-file FILE with the token they must send"
        )
    credentials = None if token_file is None else Credentials({"generate": read_credential(token_file)})
    model_dir = resolve_model(model)
    Tokenizer(model_dir)  # a folder without one could not answer: say so now, not at the first request
    num_threads = num_threads or num_cores()
    os.environ.update(process_environment(num_threads))
    from polyrhythm.engine.server import run_engine  # imports torch, which reads the environment above

    name = model_dir.name if Path(model).is_dir() else model
    return run_engine(
        model_dir=model_dir,
        store=None,
        name="standalone",
        host=host,
        port=port,
        credentials=credentials,
        config=EngineConfig(threads=num_threads),
        join_url=None,
        ready=lambda url: print(_how_to_call(url, name, token_file), flush=True),
        model_name=name,
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_credential(path: Path) -> str:
    """The token in a file of one line that only its owner can read."""
    try:
        credential, mode = path.read_text(encoding="ascii").strip(), path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not plain text"
        raise UserError(f"--token-file {path} cannot be read: {reason}") from None
    if mode & 0o077:
        raise UserError(f"--token-file {path} can be read by others: chmod 600 {path}")
    if len(credential) < _MIN_CREDENTIAL_LENGTH or len(credential.split()) != 1:
        raise UserError(
            f"--token-file {path} must hold one token of at least {_MIN_CREDENTIAL_LENGTH} characters, such as from openssl rand -hex 32"
        )
    return credential


def _how_to_call(url: str, name: str, token_file: Path | None) -> str:
    header = "" if token_file is None else f' -H "Authorization: Bearer $(cat {token_file})"'
    body = f'{{"model": "{name}", "prompt": "Once", "max_tokens": 32}}'
    return (
        f"serving {name} at {url} (OpenAI API at {url}/v1, Ctrl-C ends it)\n"
        f"  curl {url}/v1/completions{header} -H 'Content-Type: application/json' -d '{body}'"
    )
