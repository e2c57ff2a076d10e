"""The kinds of engines: what our engine server needs of whatever generates behind it, and which kinds there are."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from polyrhythm.config import EngineConfig
from polyrhythm.messages import Capabilities, EngineStatus, GenerateReply, GenerateRequest, Meeting
from polyrhythm.types import FinishReason

if TYPE_CHECKING:
    from polyrhythm.weights.store import WeightStore

NO_VERSION = -1


class NewToken(NamedTuple):
    """A token just drawn for a completion of a request; the last one says why the completion ends."""

    completion: int
    token_id: int
    logprob: float
    finish_reason: FinishReason | None


class EngineCore(Protocol):
    """One model and one version of its weights at a time. What cannot be done is refused with `engine.refusals`.

    A version is held only when its weights were loaded and verified: from the start of a load, and after one that failed,
    `status().policy_version` is `NO_VERSION` and `generate` refuses. The completion of a seed depends on weights, prompt,
    seed and sampling alone. Cancelling `generate` frees what the request held.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def is_alive(self) -> bool: ...

    async def generate(self, request: GenerateRequest) -> GenerateReply: ...

    async def load(self, version: int) -> None: ...

    def status(self) -> EngineStatus: ...

    async def failure(self) -> str:
        """Waits, as long as the engine works, for the reason why it works no more."""
        ...


class Invitation(NamedTuple):
    """To a broadcast of weights, whose members find each other through the conductor."""

    url: str
    credential: str
    meeting: Meeting


class ReceivingCore(EngineCore, Protocol):
    """A core with `capabilities.num_receivers`."""

    async def load(self, version: int, invitation: Invitation | None = None) -> None: ...


class AdjustableCore(EngineCore, Protocol):
    """A core with `capabilities.adjustable_threads`."""

    def set_threads(self, num_threads: int) -> None: ...


class StreamingCore(EngineCore, Protocol):
    """A core with `capabilities.openai_routes`: it tells tokens while they are drawn."""

    @property
    def context_length(self) -> int: ...

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[list[NewToken]], object] | None = None
    ) -> GenerateReply: ...


OpenCore = Callable[[Path, EngineConfig, "WeightStore | None"], AbstractAsyncContextManager[EngineCore]]
"""Opens a core for a model folder. Without a weight store it serves the folder's own weights as version 0."""


def _embedded(
    model_dir: Path, config: EngineConfig, store: "WeightStore | None"
) -> AbstractAsyncContextManager[EngineCore]:
    from polyrhythm.engine.embedded.engine import InferenceEngine  # a kind loads its libraries only where it is used

    return InferenceEngine(model_dir, config, store=store)


def _vllm(
    model_dir: Path, config: EngineConfig, store: "WeightStore | None"
) -> AbstractAsyncContextManager[EngineCore]:
    from polyrhythm.engine.vllm.engine import open_vllm

    return open_vllm(model_dir, config, store)


ENGINE_KINDS: dict[str, OpenCore] = {"embedded": _embedded, "vllm": _vllm}
