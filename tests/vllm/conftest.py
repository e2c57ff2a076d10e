"""A real vLLM server, started once for all tests that need no run: `make test-vllm`, or `pytest tests/vllm`.

It needs the environment that `polyrhythm setup vllm` makes. CPU builds of vLLM have kernels for some head sizes only, so the tiny
model here is not that of the other tests.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from polyrhythm.config import EngineConfig
from polyrhythm.engine.vllm import launching
from polyrhythm.engine.vllm.checking import check_server, wait_until_ready
from polyrhythm.engine.vllm.client import VllmClient
from polyrhythm.engine.vllm.engine import VllmEngine
from polyrhythm.engine.vllm.process import VllmProcess
from polyrhythm.environments import environment
from polyrhythm.tokenizer import Tokenizer
from polyrhythm.weights.store import WeightStore
from tests.conftest import VOCABULARY
from tests.tiny_model import byte_tokenizer

OPTIONS = {"enforce-eager": True, "kv-cache-memory-bytes": 64 * 2**20}
CONFIG = EngineConfig(kind="vllm", threads=1, max_batch=8, options=OPTIONS)
CONTEXT_LENGTH = 256
MADE = environment("vllm").is_made

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "vllm" in Path(item.fspath).parts:
            item.add_marker(pytest.mark.timeout(1800))
            if not MADE:
                item.add_marker(pytest.mark.skip(reason="there is no vLLM: polyrhythm setup vllm"))


def build_model(seed: int = 0):
    """Two layers with a tied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT_LENGTH, tie_word_embeddings=True,
        eos_token_id=0, bos_token_id=None, pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def vllm_model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vllm_process(vllm_model_dir: Path) -> Iterator[VllmProcess]:
    """With the extension that can be made to forget the head."""
    version = launching.check_vllm(CONFIG)
    faulty = Path(__file__).with_name("worker")

    def command_for(socket: Path) -> list[str]:
        command = launching.command_of(CONFIG, version, vllm_model_dir, socket, CONTEXT_LENGTH)
        return ["faulty_worker.FaultyWeights" if part == launching.EXTENSION else part for part in command]

    def variables_for(folder: Path) -> dict[str, str]:
        variables = launching.variables_of(folder)
        return variables | {"PYTHONPATH": os.pathsep.join([variables["PYTHONPATH"], str(faulty)])}

    async def wait(process: VllmProcess) -> None:
        async with VllmClient(socket=process.socket) as client:
            await wait_until_ready(client, process, CONFIG)

    with VllmProcess(command_for, variables_for) as process:
        asyncio.run(wait(process))
        yield process


@pytest.fixture
async def vllm_client(vllm_process: VllmProcess) -> AsyncIterator[VllmClient]:
    async with VllmClient(socket=vllm_process.socket) as client:
        yield client


@pytest.fixture
async def vllm_core(
    vllm_process: VllmProcess, vllm_client: VllmClient, vllm_model_dir: Path, tmp_path: Path
) -> AsyncIterator[VllmEngine]:
    """An engine that has loaded nothing, around the server that all tests share."""
    hello = await check_server(vllm_client, "of the tests")
    tokenizer = Tokenizer(vllm_model_dir)
    core = VllmEngine(
        vllm_client, vllm_process, CONFIG, WeightStore(tmp_path, keep=3), tokenizer, CONTEXT_LENGTH, hello
    )
    watch = asyncio.create_task(core.watch())
    yield core
    watch.cancel()
