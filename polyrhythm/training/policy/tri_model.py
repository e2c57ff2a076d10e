"""Policy, old policy and reference: three models in one engine, scored by the same code on the same layout.

The reference exists when there is a KL term, the old policy when a step makes more than one update; otherwise neither
costs memory or time.
"""

import copy
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from polyrhythm.config import AlgorithmConfig, TrainingConfig
from polyrhythm.devices import choose_device
from polyrhythm.errors import UserError
from polyrhythm.training.packing.layout import Layout
from polyrhythm.training.packing.scoring import Scores, prepare_model, score
from polyrhythm.training.policy.accumulate import accumulate_in_place
from polyrhythm.training.policy.masters import Masters, put_masters_back, split_masters

SCORE_ROW = "score_row"
"""The method of a model that scores a row. What shards a model brings its weights together around this method."""


class TriModel:
    """`score` asks the policy with gradients; `score_old` and `score_reference` ask the frozen copies without."""

    def __init__(
        self, policy: PreTrainedModel, training: TrainingConfig, algorithm: AlgorithmConfig, temperature: float,
        dtype: torch.dtype = torch.float32,
    ):  # fmt: skip
        self.temperature = temperature
        self.policy = policy
        self.shares_prompts = prepare_model(policy, training.share_prompt)
        self.dtype = dtype
        self.masters: Masters = {}
        if not training.is_sharded:  # rows are their own masters, and go to the host by themselves
            self.masters = split_masters(policy, dtype, training.offload_optimizer)  # after the probe, which is in fp32
        policy.eval()  # dropout would make the same tokens cost differently in two passes
        # A LoRA reference will be the policy with its adapters off; this is the one place that decides what it is.
        self.reference = _frozen_copy(policy, dtype) if algorithm.kl_coef > 0 else None
        self.old_policy = _frozen_copy(policy, dtype) if training.updates_per_step > 1 else None
        accumulate_in_place(policy)
        if training.gradient_checkpointing:
            _refuse_dropout(policy)
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # pyright: ignore
            for module in policy.modules():
                if isinstance(module, GradientCheckpointingLayer):
                    module.training = True  # it checkpoints in train mode only; what is inside stays in evaluation mode

        for model in self.all():
            setattr(model, SCORE_ROW, MethodType(_score_row, model))

    def all(self) -> list[PreTrainedModel]:
        """Those that there are, the policy first."""
        return [model for model in (self.policy, self.old_policy, self.reference) if model is not None]

    def score(self, layout: Layout) -> Scores:
        return self._score(self.policy, layout)

    def pass_without_gradient(self, row: Layout) -> None:
        """Forward and backward with nothing to train on, for those who wait for a pass of this process."""
        (self.score(row).logprobs_N.sum() * 0.0).backward()

    @torch.no_grad()
    def score_old(self, layout: Layout) -> Scores:
        """The policy at the start of the step: the kept copy, or the policy itself while it has not been updated."""
        return self._score(self.old_policy or self.policy, layout)

    @torch.no_grad()
    def score_reference(self, layout: Layout) -> Scores:
        assert self.reference is not None, "there is no reference model when kl_coef is 0"
        return self._score(self.reference, layout)

    def _score(self, model: PreTrainedModel, layout: Layout) -> Scores:
        return Scores(*getattr(model, SCORE_ROW)(layout, self.temperature))

    def full_policy(self) -> PreTrainedModel:
        """The policy with all digits that it has been trained with. It cannot be trained on."""
        put_masters_back(self.policy, self.masters)
        return self.policy

    @torch.no_grad()
    def remember_old_policy(self) -> None:
        if self.old_policy is not None:
            for old, new in zip(self.old_policy.parameters(), self.policy.parameters(), strict=True):
                old.copy_(new)


def load_policy(model_dir: Path, device: torch.device | None = None) -> PreTrainedModel:
    """The model of a folder in fp32; on the accelerator, if there is one and no other `device` is wanted."""
    both: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, output_loading_info=True)
    policy, loaded = both
    if missing := sorted(loaded["missing_keys"]):  # transformers would draw them at random
        raise UserError(
            f"the model in {model_dir} lacks the weights of {missing[0]}, one of {len(missing)} tensors that a "
            f"{type(policy).__name__} has: save it again, or correct its config.json"
        )
    _allow_saving(policy, model_dir)
    policy.to(device or choose_device())  # pyright: ignore
    policy.tie_weights()  # some devices give a shared parameter two copies
    return policy


def _score_row(model: PreTrainedModel, layout: Layout, temperature: float) -> tuple[Tensor, Tensor]:
    """Plain tensors: what shards a model looks for those that have a gradient."""
    scores = score(model, layout, temperature=temperature)
    return scores.logprobs_N, scores.entropy_N


def _allow_saving(policy: PreTrainedModel, model_dir: Path) -> None:
    """transformers loads settings for generation that it refuses to save: better known before training than after it."""
    settings = policy.generation_config
    if settings is None:
        return
    try:
        settings.validate(strict=True)
    except ValueError:
        settings.do_sample = True  # in older folders a temperature alone means sampling
    try:
        settings.validate(strict=True)
    except ValueError as error:
        raise UserError(
            f"{model_dir / 'generation_config.json'} could not be saved with the trained model: {error}"
        ) from None


def _refuse_dropout(policy: PreTrainedModel) -> None:
    """A layer that checkpoints is in train mode: its dropout would make the same tokens cost differently in two passes."""
    for name, value in policy.config.get_text_config().to_dict().items():
        if "drop" in name and isinstance(value, float) and value:
            raise UserError(f"training.gradient_checkpointing=true does not go with the model's {name}={value}: "
                            "set it to 0 in the model's config.json")  # fmt: skip


def _frozen_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    frozen = copy.deepcopy(model)
    frozen.requires_grad_(False)
    for parameter in frozen.parameters():
        parameter.data = parameter.data.to(dtype)
    return frozen.eval()
