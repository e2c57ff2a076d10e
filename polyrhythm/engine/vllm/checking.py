"""Whether a vLLM server is there, and whether it can be used."""

import asyncio
import json
import time
from typing import NamedTuple

from polyrhythm.config import EngineConfig
from polyrhythm.engine.vllm.client import VllmClient
from polyrhythm.engine.vllm.launching import check_routes, check_version
from polyrhythm.engine.vllm.process import VllmProcess
from polyrhythm.engine.vllm.worker.polyrhythm_worker import PROTOCOL
from polyrhythm.errors import RunError, UserError
from polyrhythm.http.errors import CallFailed, ErrorReply
from polyrhythm.weights.proof import TOLERANCES

CALL_DEADLINE_S = 30.0
READY_TICK_S = 0.25


async def wait_until_ready(client: VllmClient, process: VllmProcess | None, config: EngineConfig) -> None:
    until_s = time.monotonic() + config.joins_within_s
    while True:
        if process is not None:
            process.check_runs()
        try:
            await client.get("/health", deadline_s=CALL_DEADLINE_S)
            return
        except CallFailed as error:
            if time.monotonic() > until_s:
                raise RunError(f"vLLM was not ready within {config.joins_within_s:g} s: {error}") from None
        await asyncio.sleep(READY_TICK_S)


class Hello(NamedTuple):
    """What the workers of a server say of themselves."""

    number_format: str
    num_workers: int


async def check_server(client: VllmClient, where: str) -> Hello:
    """UserError if it is not a server that can be used."""
    check_routes(await client.get("/openapi.json", deadline_s=CALL_DEADLINE_S), where)
    version = json.loads(await client.get("/version", deadline_s=CALL_DEADLINE_S))["version"]
    check_version(version, f"the server {where}")
    try:
        answer = await client.post("/collective_rpc", {"method": "polyrhythm_hello"}, deadline_s=CALL_DEADLINE_S)
    except ErrorReply as error:
        raise UserError(f"vLLM {where} does not have our worker extension: see docs/vllm.md ({error})") from None
    hello = answer["results"][0]
    if hello["protocol"] != PROTOCOL:
        raise UserError(f"vLLM {where} has the worker extension of another version of Polyrhythm: start it again")
    if hello["number_format"] not in TOLERANCES:
        known = ", ".join(TOLERANCES)
        raise UserError(f"vLLM {where} computes in {hello['number_format']}, which proves nothing: use one of {known}")
    await client.num_tokens_generated(deadline_s=CALL_DEADLINE_S)
    return Hello(hello["number_format"], len(answer["results"]))
