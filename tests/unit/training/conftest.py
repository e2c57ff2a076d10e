"""Tiny models of every family, and the oracle: a plain transformers forward pass, one sequence at a time, full logits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from polyrhythm.training.packing.layout import Layout, PromptAndCompletions
from polyrhythm.training.packing.scoring import prepare_model

_SHAPE = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
    initializer_range=0.08,
)
_FAMILIES = {
    "llama-gqa": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE, num_key_value_heads=2, tie_word_embeddings=True)),
    "llama-mha": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE, num_key_value_heads=4)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHAPE, num_key_value_heads=1)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, num_key_value_heads=2, head_dim=16)),
}

OneByOne = Callable[[PreTrainedModel, list[PromptAndCompletions], Layout], Tensor]


@pytest.fixture(params=list(_FAMILIES), scope="module")
def prepared_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    model = _FAMILIES[request.param]()
    assert prepare_model(model, "always")
    return model


@pytest.fixture(scope="session")
def one_by_one() -> OneByOne:
    return logprobs_one_by_one


def logprobs_one_by_one(model: PreTrainedModel, groups: list[PromptAndCompletions], layout: Layout) -> Tensor:
    """Log-probabilities in the order of the layout, from separate sequences through transformers' own attention."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    order = dict.fromkeys(zip(layout.group_N.tolist(), layout.rollout_N.tolist(), strict=True))
    pieces: list[Tensor] = []
    for group, rollout in order:
        prompt, completions = groups[group]
        token_ids = torch.tensor([[*prompt, *completions[rollout]]])
        logits = model(input_ids=token_ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        # In fp64: over a vocabulary of 49k the fp32 softmax alone is 1e-5 off.
        logprobs = logits.double().log_softmax(dim=-1).gather(1, token_ids[0, len(prompt) :, None]).squeeze(1)
        pieces.append(logprobs.to(logits.dtype))
    model.set_attn_implementation(implementation)
    return torch.cat(pieces)
