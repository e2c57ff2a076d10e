"""An engine that already runs: what it is, and what it would do for anybody who can reach its port.

Nothing is asked that changes anything. A route that only takes POST answers GET with 405 if it would have been served, with
401 or 403 if it wants to know who asks, and with 404 if it does not exist.
"""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

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
OPEN_STATES = (405, 422)


def check_engine(url: str) -> Iterator[Finding]:
    """Without any credential: what this finds open is open to everybody who can reach the address."""
    try:
        client = BlockingClient(url.rstrip("/"), "", peer=f"the engine at {url}")
    except ValueError as error:
        raise UserError(f"--engine {url}: {error}") from None
    with client:
        if _state(client, "/health")[0] is None:
            yield Finding("engine", "problem", f"nothing answers at {url}", "start it, or correct the address")
            return
        states = {path: _state(client, path)[0] for path in ADMINISTRATIVE}
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


def _state(client: BlockingClient, path: str) -> tuple[int | None, bytes]:
    """The status of GET, None if there was no answer."""
    try:
        return 200, client.call("GET", path, deadline_s=DEADLINE_S, is_idempotent=True)
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
