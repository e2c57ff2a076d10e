"""Every architecture: the engine generates what transformers does, and engine and trainer agree, shared prompts or not."""

import asyncio
import copy

import pytest
import torch
from torch import Tensor

from polyrhythm.config import EngineConfig
from polyrhythm.engine.embedded.engine import InferenceEngine
from polyrhythm.engine.embedded.scheduler import PREFILL_CHUNK
from polyrhythm.messages import GenerateRequest
from polyrhythm.training.packing.layout import pack
from polyrhythm.training.packing.scoring import prepare_model, score
from polyrhythm.types import Completion, Sampling
from tests.architectures import ARCHITECTURES, VOCABULARY, build_architecture, save_architecture

NUM_TOKENS = 12
PROMPTS = [
    [1 + (7 * place + place * place) % (VOCABULARY - 1) for place in range(length)] for length in (5, 21)
]  # shorter and longer than the sliding windows


MIXTURES = [kind for kind, options in ARCHITECTURES.items() if "num_experts_per_tok" in options]
"""An expert's product rounds by how many rows it has: docs/models.md says so."""


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind) -> torch.nn.Module:
    model = build_architecture(kind)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    path = tmp_path_factory.mktemp(kind)
    save_architecture(kind, path)
    return path


async def complete(folder, seeds: list[int], temperature: float, *, together: bool = False) -> list[list[Completion]]:
    """The completions of all prompts, generated one after the other or at the same time."""
    config = EngineConfig(max_batch=16, threads=1, context_length=64)
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=temperature)
    requests = [GenerateRequest(f"{index}", 0, prompt, seeds, sampling) for index, prompt in enumerate(PROMPTS)]
    async with InferenceEngine(folder, config, stop_at_eos=False) as engine:
        if together:
            replies = await asyncio.gather(*map(engine.generate, requests))
        else:
            replies = [await engine.generate(request) for request in requests]
    return [reply.completions for reply in replies]


async def test_greedy_tokens_are_those_of_transformers_generate(folder, model):
    for prompt, (completion,) in zip(PROMPTS, await complete(folder, [0], temperature=0.0), strict=True):
        own = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
        assert completion.token_ids == own[0, len(prompt) :].tolist()


async def test_engine_and_trainer_agree_on_log_probabilities(folder, model):
    policy = copy.deepcopy(model)
    share_prompt = prepare_model(policy, "auto")
    groups = await complete(folder, [1, 2, 3], temperature=1.0)
    layouts = pack(
        [(prompt, [c.token_ids for c in group]) for prompt, group in zip(PROMPTS, groups, strict=True)],
        share_prompt=share_prompt, max_tokens=999,
    )  # fmt: skip
    expected = [logprob for group in groups for completion in group for logprob in completion.rollout_logprobs]
    with torch.no_grad():
        scored = torch.cat([score(policy, layout).logprobs_N for layout in layouts])
    torch.testing.assert_close(scored, torch.tensor(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dense", [kind for kind in ARCHITECTURES if kind not in MIXTURES])
async def test_a_completion_is_the_same_bits_alone_and_among_others(dense, tmp_path):
    save_architecture(dense, tmp_path)
    alone = await complete(tmp_path, [1, 2, 3], temperature=1.0)
    assert await complete(tmp_path, [1, 2, 3], temperature=1.0, together=True) == alone


@pytest.mark.parametrize("window", [24, 300, 4096])
@pytest.mark.parametrize("kind_with_window", ["mistral", "gemma3_text", "gpt_oss"])
async def test_windows_of_any_length_are_honoured_in_prompts_of_several_chunks(kind_with_window, window, tmp_path):
    prompt = [1 + (7 * place + place * place) % (VOCABULARY - 1) for place in range(PREFILL_CHUNK + 40)]
    options = {"sliding_window": window, "max_position_embeddings": 1024}
    model = save_architecture(kind_with_window, tmp_path, **options)
    model.generation_config.eos_token_id = None
    config = EngineConfig(max_batch=4, threads=1)
    async with InferenceEngine(tmp_path, config, stop_at_eos=False) as engine:
        request = GenerateRequest("long", 0, prompt, [0], Sampling(max_tokens=4, temperature=0.0))
        (completion,) = (await engine.generate(request)).completions
    own = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)
    assert completion.token_ids == own[0, len(prompt) :].tolist()


def test_gradients_of_packed_rows_are_those_of_separate_sequences(model):
    groups = [(prompt, [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7]]) for prompt in PROMPTS]
    # A router's choice between two experts that are nearly equal may flip in fp32.
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # the others know no fp64
    expected = gradients(model, separate_logprobs(model, groups))
    assert prepare_model(model, "auto"), "prompts are not shared"
    (layout,) = pack(groups, share_prompt=True, max_tokens=999)
    actual = gradients(model, score(model, layout).logprobs_N)
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        # transformers rounds attention weights to fp32: a gradient that is zero in exact arithmetic has noise of that.
        assert (actual[name] - gradient).norm() <= 1e-5 * torch.maximum(gradient.norm(), total / 50), name


def separate_logprobs(model, groups) -> Tensor:
    model.set_attn_implementation("eager")
    pieces = []
    for prompt, completions in groups:
        for completion in completions:
            token_ids = torch.tensor([[*prompt, *completion]])
            logits = model(input_ids=token_ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            pieces.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).squeeze(1))
    return torch.cat(pieces)


def gradients(model, logprobs_N: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    weights_N = torch.linspace(-1, 2, len(logprobs_N), dtype=logprobs_N.dtype)
    found = torch.autograd.grad((logprobs_N * weights_N).sum(), list(named.values()), allow_unused=True)
    return {name: torch.zeros_like(named[name]) if g is None else g for name, g in zip(named, found, strict=True)}
