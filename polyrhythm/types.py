"""What flows through the system: problems out, completions back, groups on to the trainer.

Plain msgspec structs without torch, so that every process can import and send them.
"""

import hashlib
from typing import Any, Literal

import msgspec

ChatMessage = dict[str, str]
FinishReason = Literal["stop", "length"]


class Problem(msgspec.Struct, frozen=True):
    """One item of a task: the prompt, and the columns its reward function is given."""

    index: int
    prompt: str | list[ChatMessage]
    columns: dict[str, Any] = {}
    epoch: int = 0
    """How often a finite task was gone through before: a problem may come twice in one step."""


class Sampling(msgspec.Struct, frozen=True):
    """How completions are drawn. `top_k = 0` and `top_p = 1` switch those filters off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


class Completion(msgspec.Struct, frozen=True):
    """What an engine returned for one seed. A stop token is the last id; a stop string ends with the token that completes it."""

    token_ids: list[int]
    rollout_logprobs: list[float]
    finish_reason: FinishReason


class Rollout(msgspec.Struct, frozen=True):
    """One completion with its reward. `reward = None`: the reward failed, the rollout is excluded and counted."""

    index: int
    completion: Completion
    policy_version: int
    reward: float | None = None


class Group(msgspec.Struct, frozen=True):
    """The rollouts of one problem: the atom of everything that flows.

    `position` is the place of its problem in the step, 0 to groups_per_step - 1: the order of `order = "problem"`.
    """

    step: int
    position: int
    problem_index: int
    prompt_ids: list[int]
    rollouts: list[Rollout]

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(rollout.completion.token_ids) for rollout in self.rollouts)


class MicroBatch(msgspec.Struct, frozen=True):
    """The groups of one forward and backward pass, each with the advantages of its rollouts."""

    version: int
    groups: list[Group]
    advantages: list[list[float]]


def rollout_seed(run_seed: int, step: int, problem_index: int, rollout_index: int, epoch: int = 0) -> int:
    """The sampling seed of a rollout: a function of its identity alone, so that a repeated request repeats its answer."""
    identity = f"{run_seed}/{step}/{problem_index}/{rollout_index}/{epoch}".encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") >> 1
