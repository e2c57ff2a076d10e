"""One way to score a packed row, for the policy with gradients and for the old policy and the reference without."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polyrhythm.errors import RunError, UserError
from polyrhythm.models import ATTENTION_LAYERS, why_not_trained
from polyrhythm.training.packing.attention import IMPLEMENTATION
from polyrhythm.training.packing.layout import Layout, pack
from polyrhythm.training.packing.logprobs import token_logprobs
from polyrhythm.training.packing.plan import AttentionPlan, Block
from polyrhythm.training.policy.accumulate import adds_in_place
from polyrhythm.training.policy.fused import fuse_elementwise
from polyrhythm.weights.logits import logits_rule

logger = logging.getLogger(__name__)

# Two small groups: enough for a state or a score to leak from one sequence into another, if it can.
_PROBE = [([3, 1, 4, 1, 5], [[9, 2, 6], [5, 3]]), ([5, 8], [[9, 7, 9], [3]])]
_PROBE_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Scores:
    """Of every target of a layout: its log-probability, and the entropy of its distribution without a gradient."""

    logprobs_N: Tensor
    entropy_N: Tensor


def score(model: PreTrainedModel, layout: Layout, *, temperature: float = 1.0) -> Scores:
    """Scores a row with a model that `prepare_model` has seen. Wrap in `torch.no_grad()` to score without a graph."""
    if recurrent_layers(model):
        # A state would flow from one sequence into the next one of the row: each gets a forward pass of its own.
        pieces = [
            _hidden_states(model, layout, _span_of(block), AttentionPlan([_moved_to_zero(block)]))
            for block in layout.blocks
        ]
        hidden_TH = torch.cat(pieces)
    else:
        plan = AttentionPlan(layout.blocks, layout.segments)
        hidden_TH = _hidden_states(model, layout, slice(0, layout.num_tokens), plan)
    head, rule = model.get_output_embeddings(), logits_rule(model.config)
    assert isinstance(head, torch.nn.Linear)
    logprobs_N, entropy_N = token_logprobs(
        hidden_TH.index_select(0, layout.predictor_M),
        head.weight,
        layout.target_N,
        row_N=layout.row_N,
        bias_V=head.bias,
        temperature=temperature / rule.scale,
        softcap=None if rule.softcap is None else rule.softcap / rule.scale,
        in_place=adds_in_place(head),
    )
    return Scores(logprobs_N, entropy_N)


def prepare_model(model: PreTrainedModel, share_prompt: Literal["auto", "always", "never"]) -> bool:
    """Installs packed attention and tells whether prompts will be shared; each model goes through here once.

    What a model cannot share is named in a warning ("auto") or an error ("always"). Named or not, a few tokens are
    scored packed and by the model's own forward pass, one sequence at a time: a model that differs is refused.
    """
    if model.dtype not in (torch.float32, torch.float64):
        raise UserError(f"{type(model).__name__} is in {model.dtype}: gradients are summed in the dtype of the weights, "
                        "load it with dtype=torch.float32")  # fmt: skip
    reasons = reasons_against_sharing(model)
    expected = _logprobs_one_by_one(model)
    model.set_attn_implementation(IMPLEMENTATION)
    fuse_elementwise(model)
    try:
        difference = _probe_difference(model, expected, share_prompt=False)
    except RunError as error:
        raise UserError(f"{type(model).__name__} cannot be trained: its layers do not call the attention function they "
                        f"are given ({error})") from None  # fmt: skip
    if difference > _PROBE_TOLERANCE:
        raise UserError(
            f"{type(model).__name__} cannot be trained: packed log-probabilities differ by {difference:.2g} from its "
            "own (it changes attention, or its logits after the head, in a way this trainer does not know)"
        )
    if share_prompt == "never":
        return False
    if not reasons:
        difference = _probe_difference(model, expected, share_prompt=True)
        if difference > _PROBE_TOLERANCE:
            reasons = [f"log-probabilities of a probe differ by {difference:.2g} when its prompts are shared"]
    if not reasons:
        return True
    message = f"{type(model).__name__} cannot share prompts: {'; '.join(reasons)}"
    if share_prompt == "always":
        raise UserError(f'training.share_prompt="always": {message}. Use "auto" or "never"')
    logger.warning("%s. Packing every completion with its own copy of the prompt.", message)
    return False


def reasons_against_sharing(model: PreTrainedModel) -> list[str]:
    """Why a model's prompts cannot be shared, as far as its configuration tells. Raises for what cannot be packed at all."""
    config = model.config.get_text_config()
    if why := why_not_trained(config.to_dict()):
        raise UserError(f"{type(model).__name__} {why}: it cannot be trained")
    reasons: list[str] = []
    if dropout := getattr(config, "attention_dropout", 0.0):
        reasons.append(f"attention_dropout={dropout} (set it to 0 in the model's configuration)")
    if recurrent := recurrent_layers(model):
        reasons.append(f"layers of type {', '.join(recurrent)} carry a state along the row")
    return reasons


def _hidden_states(model: PreTrainedModel, layout: Layout, span: slice, plan: AttentionPlan) -> Tensor:
    output = model.get_decoder()(
        input_ids=layout.token_ids_T[None, span],
        position_ids=layout.position_ids_T[None, span],
        use_cache=False,
        attention_plan=plan,
    )
    expected = sum(kind in ATTENTION_LAYERS for kind in _layer_types(model))
    if plan.num_calls != expected:
        raise RunError(
            f"{type(model).__name__} ran packed attention in {plan.num_calls} of {expected} layers (implementation "
            f"{model.config._attn_implementation!r}): another backend would misread the row; call prepare_model first"
        )
    return output.last_hidden_state[0]


def _layer_types(model: PreTrainedModel) -> list[str]:
    config = model.config.get_text_config()
    declared = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return list(declared) if declared else ["full_attention"] * config.num_hidden_layers


def recurrent_layers(model: PreTrainedModel) -> list[str]:
    """Kinds of layers that carry a state from token to token."""
    return sorted(set(_layer_types(model)) - ATTENTION_LAYERS)


def _span_of(block: Block) -> slice:
    return slice(block.prompt_start, block.stop)


def _moved_to_zero(block: Block) -> Block:
    starts = tuple(start - block.prompt_start for start in block.completion_starts)
    return Block(0, block.prompt_length, starts, block.completion_lengths)


@torch.no_grad()
def _logprobs_one_by_one(model: PreTrainedModel) -> Tensor:
    """The probe's log-probabilities by the model's own forward pass and eager attention, one sequence at a time."""
    model.set_attn_implementation("eager")
    logprobs: list[Tensor] = []
    with _evaluating(model):
        for prompt, completions in _PROBE:
            for completion in completions:
                token_ids = torch.tensor([prompt + completion], device=model.device)
                logits = model(input_ids=token_ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
                targets = torch.tensor(completion).unsqueeze(1)
                # On the host, because not every device has double precision.
                logprobs.append(logits.cpu().to(torch.float64).log_softmax(dim=-1).gather(1, targets).squeeze(1))
    return torch.cat(logprobs)


@torch.no_grad()
def _probe_difference(model: PreTrainedModel, expected_N: Tensor, *, share_prompt: bool) -> float:
    (layout,) = pack(_PROBE, share_prompt=share_prompt, max_tokens=64)
    with _evaluating(model):
        scores = score(model, layout.to(model.device))
    return (scores.logprobs_N.cpu() - expected_N).abs().max().item()


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
