"""An engine that already runs: what it is, and what it would do for anybody who can reach its port.

Nothing is asked that changes anything. A route that only takes POST answers GET with 405 if it would have been served, with
401 or 403 if it wants to know who asks, and with 404 if it does not exist.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from polyrhythm.doctor.engine_numbers import (
    asking_openai,
    asking_ours,
    check_logprob_mode,
    check_status,
    check_weights,
    post_json,
    version_of,
)
from polyrhythm.doctor.findings import Finding
from polyrhythm.errors import UserError
from polyrhythm.http.client import BlockingClient
from polyrhythm.http.errors import CallFailed, ErrorReply

DEADLINE_S = 5.0
ADMINISTRATIVE = (
    "/collective_rpc", "/init_weight_transfer_engine", "/update_weights", "/pause", "/resume", "/sleep", "/wake_up",
    "/reset_prefix_cache", "/reset_mm_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/scale_elastic_ep",
    "/start_profile", "/update_weights_from_disk", "/update_weights_from_distributed", "/flush_cache", "/load", "/threads",
)  # fmt: skip
"""Of vLLM, SGLang and our own engines: whoever may call them changes what is computed, or stops it."""
TELLING = ("/server_info", "/get_server_info", "/openapi.json", "/metrics")
"""What they tell is not secret by itself, but is nobody else's business."""
OUR_ROUTE = "/threads"
OPEN_STATES = (400, 405, 422)


def check_engine(url: str, credential: str = "", model_dir: Path | None = None) -> Iterator[Finding]:
    """What is open is found without any credential; what it computes is asked with the one that is given, if it wants one."""
    url = url.rstrip("/")
    try:
        client = BlockingClient(url, "", peer=f"the engine at {url}")
    except ValueError as error:
        raise UserError(f"--engine {url}: {error}") from None
    with client:
        if _state(client, "/health")[0] is None:
            yield Finding("engine", "problem", f"nothing answers at {url}", "start it, or correct the address")
            return
        states = {path: _state(client, path)[0] for path in ADMINISTRATIVE}
        if (
            states[OUR_ROUTE] in OPEN_STATES
        ):  # ours look at the credential only when it is a POST; an empty one does nothing
            states[OUR_ROUTE] = _state(client, OUR_ROUTE, "POST")[0]
        version = _json(client, "/version").get("version")
        models = [model.get("id") for model in _json(client, "/v1/models").get("data", [])]
        told = [path for path in TELLING if _state(client, path)[0] == 200]
    kind = f"version {version}" if version else "it does not tell its version without a credential"
    serves = f", serves {', '.join(map(str, models))}" if models else ""
    numbers = {"version": version, "models": models, "states": states, "told": told}
    yield Finding("engine", "ok", f"{url} answers: {kind}{serves}", numbers=numbers)
    is_open = [path for path, state in states.items() if state in OPEN_STATES]
    if is_open:
        where = "this machine" if urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1") else "the network"
        yield Finding(
            "engine", "problem", f"anybody on {where} may call {', '.join(is_open)} without a credential",
            "let the run start its engine on a private socket, or put the server behind a proxy that asks for a "
            "credential (vLLM's --api-key guards /v1 alone)",
        )  # fmt: skip
    else:
        yield Finding("engine", "ok", f"none of {len(ADMINISTRATIVE)} administrative routes is open")
    if told:
        yield Finding("engine", "warning", f"anybody may read {', '.join(told)}", "close the port to others")
    if "/collective_rpc" in is_open:
        yield _extension(url)
    yield from _numbers(url, credential, model_dir)


def _numbers(url: str, credential: str, model_dir: Path | None) -> Iterator[Finding]:
    """What it computes, as far as it answers us."""
    yield from check_status(url, credential)
    version, served = version_of(url, credential), _served(url, credential)
    if version is not None and version >= 0:
        ask = asking_ours(url, credential, version)
    elif served:
        ask = asking_openai(url, credential, served[0])
    else:
        fix = "give --token-file: tokens.json of its run, or the token that it was started with"
        yield Finding(
            "engine", "warning", "what it computes cannot be seen: it does not answer without a credential", fix
        )
        return
    try:
        yield from check_logprob_mode(ask)
        if model_dir is not None and not version:  # later versions of a run are its own
            yield from check_weights(ask, model_dir)
    except (CallFailed, OSError, KeyError) as error:
        text = f"what it computes cannot be seen: {type(error).__name__}: {error}"
        yield Finding("engine", "warning", text, "let it answer /v1/completions with token ids (vLLM 0.32 does)")


def _extension(url: str) -> Finding:
    """Whether a run could load weights into a vLLM, and prove that it did. To say hello changes nothing."""
    try:
        hello = post_json(f"{url}/collective_rpc", "", {"method": "polyrhythm_hello"})["results"][0]
    except (OSError, ValueError, KeyError):
        text = "its workers do not have our extension: no run can load weights into it, or prove that they are in use"
        return Finding("engine", "warning", text, "start it as docs/vllm.md says, if it shall serve a run")
    text = f"its workers have our extension, in {hello['number_format']}: a run that uses it proves every load"
    return Finding("engine", "ok", text, numbers=hello)


def _served(url: str, credential: str) -> list[str]:
    with BlockingClient(url, credential, peer=f"the engine at {url}") as client:
        return [str(model.get("id")) for model in _json(client, "/v1/models").get("data", [])]


def _state(client: BlockingClient, path: str, method: str = "GET") -> tuple[int | None, bytes]:
    """The status of a request without a body, None if there was no answer."""
    try:
        return 200, client.call(method, path, deadline_s=DEADLINE_S, is_idempotent=True)
    except ErrorReply as error:
        return error.status, b""
    except CallFailed:
        return None, b""


def _json(client: BlockingClient, path: str) -> dict[str, Any]:
    try:
        content = json.loads(_state(client, path)[1] or b"{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
