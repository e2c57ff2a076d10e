"""Proof of load: what an engine computes shows which weights it computes with. Digests of files cannot show that.

With each version the trainer stores the log-probabilities of a few tokens, its *probe*. An engine serves the version only if
its own agree. Neighbouring versions differ by less than some number formats can tell, so an engine that joins first loads a
*canary*: the same weights with some columns of every tensor negated, chosen by a seed. Whatever is still in use from
before a load (a packed head, a cache, a copy) then shows at once. To negate is exact, and to negate again undoes it. Zeros show
nothing.
"""

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyrhythm.errors import RunError
from polyrhythm.weights.export import Rows, RowsOf, named_weights, whole
from polyrhythm.weights.snapshot import Manifest, Probe, SnapshotError
from polyrhythm.weights.widening import computing_in_fp32

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_SEQUENCES = 1
SEQUENCE_LENGTH = 6  # few tokens cost little beside reading all weights once, which takes the rest of the time
NEGATED_OF_A_MATRIX = 32
"""One column in so many is negated in a canary: 9 ms instead of 150 for a model of half a gigabyte, and nats of difference."""
NEGATED_OF_A_VECTOR = 2
"""Norms and biases are small, and single entries of them may mean little."""

TOLERANCES = {"float64": 1e-3, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""How far log-probabilities of the same weights may lie apart, by the number format that they are computed in."""

ProbeLogprobs = Callable[[Sequence[Sequence[int]]], list[float]]
"""Of every token but the first of each sequence: its log-probability after those before it."""


class ProofFailed(SnapshotError):
    """An engine has loaded a version and computes something else."""


def probe_of(
    model: "PreTrainedModel", version: int, rows_of: RowsOf = whole, end_pass: Callable[[], None] = lambda: None
) -> Probe:
    """What a model of transformers computes now, by its own forward pass. Its weights are not changed, not by a bit.

    Processes that hold some rows of it each call this together: `rows_of` says which, and after every pass `end_pass` lets
    whole tensors go, so that the next one is computed with the rows as they are then.
    """
    vocab_size = model.config.get_text_config().vocab_size
    number_format = "float32"  # it is computed in fp32, whatever the weights are kept in
    weights = [rows_of(name, tensor) for name, tensor in named_weights(model).items()]

    def logprobs_of(sequences: Sequence[Sequence[int]]) -> list[float]:
        logprobs = own_logprobs(model, sequences)
        end_pass()
        return logprobs

    return make_probe(version, vocab_size, weights, logprobs_of, number_format)


def prove_model(model: "PreTrainedModel", manifest: Manifest) -> None:
    """Raises ProofFailed unless a model of transformers computes what the version of this manifest does."""
    probe = required_probe(manifest)
    check_proof(manifest.version, probe, own_logprobs(model, probe.sequences), "float32", is_canary=False)


def make_probe(
    version: int, vocab_size: int, weights: Sequence[Rows], logprobs_of: ProbeLogprobs, number_format: str
) -> Probe:
    """The probe of `version`, whose weights are in use by `logprobs_of`; they are the same bits again when this returns."""
    draw = random.Random(version)
    sequences = [[draw.randrange(vocab_size) for _ in range(SEQUENCE_LENGTH)] for _ in range(NUM_SEQUENCES)]
    logprobs = logprobs_of(sequences)
    with _perturbed(weights, seed=version):
        canary_logprobs = logprobs_of(sequences)
    if not all(map(math.isfinite, logprobs + canary_logprobs)):
        raise RunError(
            f"weights v{version} give log-probabilities that are not finite: training has diverged; "
            "lower training.learning_rate or training.max_grad_norm"
        )
    return Probe(version, sequences, logprobs, canary_logprobs, number_format)


def negate_for_canary(weights: Mapping[str, Tensor], seed: int) -> None:
    """Turn weights into their canary, or back, in place."""
    _negate([whole(name, tensor) for name, tensor in weights.items()], seed)


def _negate(weights: Sequence[Rows], seed: int) -> None:
    for name, shape, first_row, rows, _ in weights:
        if rows.is_floating_point():
            first, num = canary_columns(seed, name, shape)
            if len(shape) == 1:  # its columns are its rows
                rows[max(0, first - first_row) : max(0, first + num - first_row)].neg_()
            else:
                rows.narrow(-1, first, num).neg_()


def canary_columns(seed: int, name: str, shape: Sequence[int]) -> tuple[int, int]:
    """First and number of the columns that are negated. Each tensor has others: where all had the same, two would cancel out."""
    num_columns = shape[-1]
    num = max(1, num_columns // (NEGATED_OF_A_VECTOR if len(shape) == 1 else NEGATED_OF_A_MATRIX))
    draw = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
    return draw % (num_columns - num + 1), num


def required_probe(manifest: Manifest) -> Probe:
    """What an engine must reproduce; a version without it is not for engines."""
    if manifest.probe is None:
        raise SnapshotError(
            f"weights v{manifest.version} carry no probe: an engine could not prove that it computes them"
        )
    return manifest.probe


def check_proof(version: int, probe: Probe, logprobs: Sequence[float], number_format: str, *, is_canary: bool) -> None:
    """Raises ProofFailed, with the numbers, unless an engine's log-probabilities are those of the probe or of its canary.

    `number_format` is the engine's; the coarser of that and the trainer's says how far apart they may be.
    """
    expected = probe.canary_logprobs if is_canary else probe.logprobs
    number_format = max(number_format, probe.number_format, key=TOLERANCES.__getitem__)
    tolerance = TOLERANCES[number_format]
    if len(logprobs) != len(expected):
        raise ProofFailed(f"weights v{version}: {len(logprobs)} log-probabilities for the {len(expected)} of the probe")
    gaps = [abs(own - right) for own, right in zip(logprobs, expected, strict=True)]
    worst = max(range(len(gaps)), key=lambda index: math.inf if math.isnan(gaps[index]) else gaps[index])
    if not gaps[worst] <= tolerance:
        what = "the canary of weights" if is_canary else "weights"
        raise ProofFailed(
            f"{what} v{version} are loaded but not what is computed: a log-probability of the probe is {logprobs[worst]:.4f} "
            f"where the trainer has {expected[worst]:.4f}, {gaps[worst]:.2g} apart and at most {tolerance:g} in {number_format}"
        )


def own_logprobs(model: "PreTrainedModel", sequences: Sequence[Sequence[int]]) -> list[float]:
    """By the model's own forward pass in fp32: of every token but the first of each sequence, all of one length."""
    implementation, was_training = model.config._attn_implementation or "eager", model.training
    model.set_attn_implementation("eager")  # that of training understands packed rows alone
    if was_training:  # otherwise some of its layers may be in train mode on purpose: those that checkpoint
        model.eval()
    try:
        with (
            torch.no_grad(),
            computing_in_fp32(model),
        ):  # what the published numbers are worth, whoever computes with them
            ids = torch.tensor(sequences, device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).flatten().tolist()
    finally:
        model.set_attn_implementation(implementation)
        if was_training:
            model.train()


@contextmanager
def _perturbed(weights: Sequence[Rows], seed: int) -> Iterator[None]:
    _negate(weights, seed)
    try:
        yield
    finally:
        _negate(weights, seed)
