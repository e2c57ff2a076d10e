"""vLLM goes through the contract of every engine, behind the server that all of them share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polyrhythm.engine.server import make_server
from polyrhythm.engine.vllm.engine import VllmEngine
from polyrhythm.http.async_client import open_session
from polyrhythm.http.listener import Listener
from tests.contracts.test_engines import *  # noqa: F403
from tests.contracts.test_engines import CREDENTIALS, Engine
from tests.publishing import publish
from tests.vllm.conftest import build_model


@pytest.fixture
async def engine(vllm_core: VllmEngine, vllm_model_dir: Path) -> AsyncIterator[Engine]:
    """As the contract wants it: the store holds the versions 3 and 4, and 5 with one byte changed."""
    store = vllm_core._store
    for version in (3, 4, 5):
        publish(store, build_model(seed=version), version)
    weights = store.folder(5) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    async with Listener("127.0.0.1", 0) as listener:
        server = make_server(vllm_core, CREDENTIALS, vllm_model_dir, "tiny")
        async with server.serving(listener) as url, open_session() as session:
            engine = Engine(session, url, CREDENTIALS)
            engine.core, engine.store = vllm_core, store
            yield engine
