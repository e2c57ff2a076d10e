"""What is particular to vLLM: the head that stays behind, numbers against transformers, stops, and closed doors."""

import asyncio
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest
import torch

from polyrhythm.engine.server import make_server
from polyrhythm.engine.vllm.client import VllmClient
from polyrhythm.engine.vllm.engine import VllmEngine
from polyrhythm.engine.vllm.process import VllmProcess
from polyrhythm.http.listener import Listener
from polyrhythm.messages import GenerateRequest
from polyrhythm.types import Sampling
from polyrhythm.weights.proof import ProofFailed
from tests.contracts.test_engines import CREDENTIALS
from tests.publishing import publish
from tests.vllm.conftest import build_model

DEADLINE_S = 120.0


def asking(version: int, prompt: list[int], **sampling) -> GenerateRequest:
    seeds = [random.Random(index).getrandbits(63) for index in range(4)]
    return GenerateRequest("r", version, prompt, seeds, Sampling(**({"max_tokens": 12} | sampling)))


async def forget_to_repack(client: VllmClient, really: str) -> None:
    call = {"method": "polyrhythm_forget_to_repack", "args": [really]}
    await client.post("/collective_rpc", call, deadline_s=DEADLINE_S)


async def test_a_head_that_stays_behind_is_refused_by_the_canary(vllm_core: VllmEngine, vllm_client: VllmClient):
    publish(vllm_core._store, build_model(seed=1), 1)
    await forget_to_repack(vllm_client, "yes")
    try:
        with pytest.raises(ProofFailed, match="the canary of weights v1 are loaded but not what is computed"):
            await vllm_core.load(1)
        assert vllm_core.status().policy_version == -1
    finally:
        await forget_to_repack(vllm_client, "no")
    await vllm_core.load(1)
    assert vllm_core.status().policy_version == 1


async def test_log_probabilities_are_those_of_the_loaded_weights_and_temperature(vllm_core: VllmEngine):
    for version in (1, 2):
        publish(vllm_core._store, model := build_model(seed=version), version)
        await vllm_core.load(version)
        request = asking(version, [5, 6, 7, 8], temperature=0.7)
        for completion in (await vllm_core.generate(request)).completions:
            ids = torch.tensor([request.prompt_ids + completion.token_ids])
            with torch.no_grad():
                logprobs = (model(ids).logits[0, 3:-1].double() / 0.7).log_softmax(-1)
            expected = logprobs.gather(1, ids[0, 4:, None])[:, 0]
            assert (torch.tensor(completion.rollout_logprobs) - expected).abs().max() < 1e-4


async def test_a_torn_and_an_altered_snapshot_are_refused_and_the_next_one_is_served(vllm_core: VllmEngine):
    store = vllm_core._store
    for version in (1, 2, 3):
        publish(store, build_model(seed=version), version)
    torn, altered = (store.folder(version) / "model.safetensors" for version in (1, 2))
    torn.write_bytes(torn.read_bytes()[:-100])
    altered.write_bytes(altered.read_bytes()[:-4] + b"\x01\x02\x03\x04")
    for version, said in ((1, "the snapshot is torn"), (2, "digests differ")):
        with pytest.raises(Exception, match=said):
            await vllm_core.load(version)
        assert vllm_core.status().policy_version == -1
    await vllm_core.load(3)
    assert len((await vllm_core.generate(asking(3, [5]))).completions) == 4


async def test_stop_tokens_are_kept_and_a_stop_string_ends_with_the_token_that_completes_it(vllm_core: VllmEngine):
    publish(vllm_core._store, build_model(seed=1), 1)
    await vllm_core.load(1)
    free = (await vllm_core.generate(asking(1, [5, 6], max_tokens=40))).completions
    longest = max(range(4), key=lambda index: len(free[index].token_ids))
    drawn = free[longest].token_ids
    token = drawn[len(drawn) // 2]
    request = asking(1, [5, 6], max_tokens=40, stop_token_ids=(token,))
    stopped = (await vllm_core.generate(request)).completions[longest]
    assert stopped.token_ids == drawn[: drawn.index(token) + 1] and stopped.finish_reason == "stop"
    text = "!"  # token 1 of the byte tokenizer
    for completion in (await vllm_core.generate(asking(1, [5, 6], max_tokens=200, stop=(text,)))).completions:
        assert len(completion.token_ids) == len(completion.rollout_logprobs)
        assert 1 not in completion.token_ids[:-1]


async def test_every_generated_token_is_counted(vllm_core: VllmEngine):
    publish(vllm_core._store, build_model(seed=1), 1)
    await vllm_core.load(1)
    # Not from the status, which lags: what the proof of the load has drawn counts too.
    before = await vllm_core._client.num_tokens_generated(deadline_s=DEADLINE_S)
    reply = await vllm_core.generate(asking(1, [5, 6], max_tokens=200))
    num_tokens = sum(len(completion.token_ids) for completion in reply.completions)
    async with asyncio.timeout(DEADLINE_S):
        while vllm_core.status().num_tokens_generated < before + num_tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert vllm_core.status().num_tokens_generated == before + num_tokens


async def test_administration_is_closed_to_other_processes(
    vllm_core: VllmEngine, vllm_process: VllmProcess, vllm_model_dir: Path
):
    async with Listener("127.0.0.1", 0) as listener:
        server = make_server(vllm_core, CREDENTIALS, vllm_model_dir, "tiny")
        async with server.serving(listener) as url, aiohttp.ClientSession() as session:
            for path in ("/collective_rpc", "/pause", "/update_weight_version", "/inference/v1/generate"):
                async with session.post(url + path, json={}) as reply:
                    assert reply.status in (401, 404), path
            async with session.post(url + "/weights/load", data=b"") as reply:
                assert reply.status == 401
    assert vllm_process.socket.parent.stat().st_mode & 0o777 == 0o700
    assert not open_ports_that_answer_http()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_the_socket(vllm_process: VllmProcess):
    code = f"import os, socket; os.setgid(65534); os.setuid(65534); socket.socket(socket.AF_UNIX).connect({str(vllm_process.socket)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert "PermissionError" in done.stderr


def open_ports_that_answer_http() -> list[int]:
    """Ports of our descendants that speak HTTP."""
    ports = []
    for process in psutil.Process().children(recursive=True):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                with socket.create_connection(("127.0.0.1", connection.laddr.port), timeout=5) as client:
                    client.settimeout(1)
                    client.sendall(b"POST /pause HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
                    try:
                        answer = client.recv(100)
                    except OSError:
                        answer = b""
                    if answer.startswith(b"HTTP"):
                        ports.append(connection.laddr.port)
    return ports
