"""What flows through the system: problems out, completions back, groups of traces on to the trainer.

Plain msgspec structs without torch, so that every process can import and send them. Of those that a rollout consists of there
are hundreds of thousands in flight: they form no cycles, and the garbage collector does not look at them (`gc=False`).
"""

import hashlib
from typing import Any, Literal

import msgspec

ChatMessage = dict[str, Any]
"""`role` and `content` as text, and what else the model's chat template reads, such as `tool_calls`."""
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


class Completion(msgspec.Struct, frozen=True, gc=False):
    """What an engine returned for one seed. A stop token is the last id; a stop string ends with the token that completes it."""

    token_ids: list[int]
    rollout_logprobs: list[float]
    finish_reason: FinishReason


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One stretch of a rollout: what it was given, then what the policy sampled after that.

    Given tokens (a hint, the result of a tool) are attended to and never in the loss; sampled ones are.
    """

    given_ids: list[int]
    token_ids: list[int]
    rollout_logprobs: list[float]
    finish_reason: FinishReason


class Trace(msgspec.Struct, frozen=True, gc=False):
    """All tokens of a rollout after its prompt. Who sampled what is the shape of the data: there is no mask to get wrong."""

    turns: list[Turn]

    @classmethod
    def of(cls, completion: Completion) -> "Trace":
        """A completion of the prompt itself: one turn that was given nothing."""
        return cls([Turn([], completion.token_ids, completion.rollout_logprobs, completion.finish_reason)])

    @property
    def token_ids(self) -> list[int]:
        """Every token after the prompt, given and sampled."""
        if len(self.turns) == 1 and not self.turns[0].given_ids:
            return self.turns[0].token_ids  # the usual case, without a copy
        return [token_id for turn in self.turns for ids in (turn.given_ids, turn.token_ids) for token_id in ids]

    @property
    def sampled_mask(self) -> list[bool]:
        """Of every token after the prompt: whether the policy sampled it."""
        return [
            is_sampled
            for turn in self.turns
            for ids, is_sampled in ((turn.given_ids, False), (turn.token_ids, True))
            for _ in ids
        ]

    @property
    def rollout_logprobs(self) -> list[float]:
        """Of the sampled tokens, in their order."""
        return [logprob for turn in self.turns for logprob in turn.rollout_logprobs]

    @property
    def num_tokens(self) -> int:
        """Every token after the prompt: what a row of the trainer holds."""
        return sum(len(turn.given_ids) + len(turn.token_ids) for turn in self.turns)

    @property
    def num_sampled(self) -> int:
        """The tokens that count in the loss, in its weights and in its divisor."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def finish_reason(self) -> FinishReason:
        return self.turns[-1].finish_reason


class Rollout(msgspec.Struct, frozen=True, gc=False):
    """One trace with its reward. `reward = None`: it failed or no function applies; the rollout is excluded and counted."""

    index: int
    trace: Trace
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
    scores: dict[str, list[float | None]] = {}
    """What each reward function said of its rollouts, before weighting; None where it does not apply or has failed."""
    failed: list[int] = []
    """The rollouts whose reward failed."""

    @property
    def num_sampled(self) -> int:
        """The tokens of all its rollouts that count in the loss."""
        return sum(rollout.trace.num_sampled for rollout in self.rollouts)


class MicroBatch(msgspec.Struct, frozen=True):
    """The groups of one forward and backward pass, each with the advantages of its rollouts."""

    version: int
    groups: list[Group]
    advantages: list[list[float]]


def rollout_seed(run_seed: int, step: int, problem_index: int, rollout_index: int, epoch: int = 0) -> int:
    """The sampling seed of a rollout: a function of its identity alone, so that a repeated request repeats its answer."""
    identity = f"{run_seed}/{step}/{problem_index}/{rollout_index}/{epoch}".encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") >> 1
