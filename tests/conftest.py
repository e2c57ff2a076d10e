"""Fixtures of all tests: tiny models built from a config, groups made by a script, a source that hands them out."""

import os
import random
import signal

# Read by MKL at its first product, as in a run's processes: rows then round alike for any number of rows and threads.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

import msgspec
import pytest
import torch
from hypothesis import settings

from polyrhythm.messages import GroupsReply
from polyrhythm.types import Completion, Group, Rollout, Trace

VOCABULARY = 96

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A suite started in the background of a shell ignores Ctrl-C, and its children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Properties are tried on the same examples in every run: a suite that is red by chance helps nobody.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

torch.set_num_threads(1)  # tiny models: a second thread costs more than it brings


def build_tiny_model(kind: str, seed: int = 0) -> torch.nn.Module:
    """Two layers of a Llama, Qwen2 or Qwen3 with grouped-query attention."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )  # fmt: skip

    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[kind]
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=kind != "qwen2",
        eos_token_id=2, pad_token_id=2, bos_token_id=1, initializer_range=0.05,
    )  # fmt: skip
    return model_class(config).eval()


@pytest.fixture(params=["llama", "qwen3"])
def tiny_policy(request: pytest.FixtureRequest) -> torch.nn.Module:
    return build_tiny_model(request.param)


def make_group(
    position: int, *, step: int = 0, group_size: int = 4, seed: int = 0, version: int | None = None
) -> Group:
    """A group with random tokens and lengths from 1 to 9; about one group in four has no reward variance."""
    draw = random.Random(f"{seed}/{step}/{position}")
    rewards = [float(draw.random() < 0.5) for _ in range(group_size)] if position % 4 != 3 else [1.0] * group_size
    rollouts = []
    for index, reward in enumerate(rewards):
        length = draw.randint(1, 9)
        completion = Completion(
            token_ids=[draw.randrange(VOCABULARY) for _ in range(length)],
            rollout_logprobs=[-draw.random() for _ in range(length)],
            finish_reason="stop",
        )
        rollouts.append(Rollout(index, Trace.of(completion), step if version is None else version, reward))
    prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(2, 20))]
    return Group(step=step, position=position, problem_index=position, prompt_ids=prompt, rollouts=rollouts)


class ScriptedSource:
    """Hands out groups in the given arrivals: each poll that may wait brings the next arrival."""

    def __init__(self, arrivals: list[list[Group]], events: list[str] | None = None):
        self.arrivals = arrivals
        self.handed_out: list[Group] = []
        self.num_arrived = 0
        self.events = events if events is not None else []

    def published(self, version: int, metrics: dict[str, float]) -> None:
        self.events.append(f"published {version}")

    def wait_for_engines(self, version: int, deadline_s: float) -> None:
        self.events.append(f"engines hold {version}")
        self.num_arrived, self.handed_out = 0, []

    def groups(self, version: int, offset: int, until: int, wait_s: float) -> GroupsReply:
        if wait_s > 0 and self.num_arrived < len(self.arrivals):
            arrival = [msgspec.structs.replace(group, step=version) for group in self.arrivals[self.num_arrived]]
            self.handed_out += arrival
            self.num_arrived += 1
            self.events += [f"finished {group.position}" for group in arrival]
        return GroupsReply(groups=self.handed_out[offset:until], is_last=len(self.handed_out) >= until)
