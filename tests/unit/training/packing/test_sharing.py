"""Shared equals unshared: packed log-probabilities and gradients against those of separate sequences."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyrhythm.training.packing.attention import AttentionPlan, looped_attention, merged_flash_attention
from polyrhythm.training.packing.layout import pack
from polyrhythm.training.packing.scoring import prepare_model, score

quick = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
tokens = st.integers(0, 95)
groups_of_rollouts = st.lists(
    st.tuples(
        st.lists(tokens, min_size=1, max_size=20),
        st.lists(st.lists(tokens, min_size=1, max_size=9), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=3,
)


def weights_like(logprobs_N: Tensor) -> Tensor:
    """Stands for the advantages: any fixed numbers of both signs."""
    return torch.cos(torch.arange(logprobs_N.numel(), dtype=logprobs_N.dtype))


def gradients(model: torch.nn.Module, logprobs_N: Tensor) -> list[Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad((logprobs_N * weights_like(logprobs_N)).sum(), parameters))


def relative_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Largest error of a parameter's gradient, relative to it; one below a fiftieth of the whole gradient counts as that.

    The gradient of a key norm is a small difference of large terms: relative to itself its rounding has no bound.
    """
    total = torch.stack([gradient.norm() for gradient in expected]).norm()
    errors = [(a - e).norm() / torch.maximum(e.norm(), total / 50) for a, e in zip(actual, expected, strict=True)]
    return torch.stack(errors).max().item()


@pytest.mark.parametrize("checkpointing", [False, True])
@quick
@given(groups=groups_of_rollouts, share_prompt=st.booleans())
def test_packed_rows_equal_separate_sequences(prepared_model, one_by_one, checkpointing, groups, share_prompt):
    (layout,) = pack(groups, share_prompt=share_prompt, max_tokens=10_000)
    expected_N = one_by_one(prepared_model, groups, layout)
    expected_gradients = gradients(prepared_model, expected_N)
    if checkpointing:
        prepared_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        actual_N = score(prepared_model, layout).logprobs_N
        actual_gradients = gradients(prepared_model, actual_N)
    finally:
        prepared_model.gradient_checkpointing_disable()
    assert (actual_N - expected_N).abs().max() < 5e-6
    assert relative_error(actual_gradients, expected_gradients) < 1e-5


@quick
@given(groups=groups_of_rollouts, max_tokens=st.integers(1, 60))
def test_splitting_groups_over_rows_changes_neither_values_nor_gradients(prepared_model, groups, max_tokens):
    (whole,) = pack(groups, share_prompt=True, max_tokens=10_000)
    expected_N = score(prepared_model, whole).logprobs_N
    actual_N = torch.cat(
        [score(prepared_model, row).logprobs_N for row in pack(groups, share_prompt=True, max_tokens=max_tokens)]
    )
    assert (actual_N - expected_N).abs().max() < 5e-6
    assert relative_error(gradients(prepared_model, actual_N), gradients(prepared_model, expected_N)) < 1e-5


def test_changing_one_completion_leaves_its_siblings_bit_identical(prepared_model):
    prompt = list(range(11))
    completions = [[5, 7, 9, 11], [13, 15], [17, 19, 21, 23, 25, 27], [29], [31, 33, 35, 37]]
    before, after = (
        score(prepared_model, pack([(prompt, variant)], share_prompt=True, max_tokens=999)[0]).logprobs_N
        for variant in (completions, [*completions[:2], [90, 80, 70, 60, 50, 40], *completions[3:]])
    )
    changed = slice(6, 12)
    assert not torch.equal(before[changed], after[changed])
    assert torch.equal(before[: changed.start], after[: changed.start])
    assert torch.equal(before[changed.stop :], after[changed.stop :])


def test_permuting_completions_permutes_log_probabilities_bit_for_bit(prepared_model):
    prompt = list(range(11))
    completions = [[5, 7, 9, 11], [13, 15], [17, 19, 21, 23, 25, 27], [29], [31, 33, 35, 37]]
    order = [3, 0, 4, 2, 1]
    (before,), (after,) = (
        pack([(prompt, variant)], share_prompt=True, max_tokens=999)
        for variant in (completions, [completions[index] for index in order])
    )
    before_N, after_N = (score(prepared_model, layout).logprobs_N for layout in (before, after))
    for place, original in enumerate(order):
        assert torch.equal(after_N[after.rollout_N == place], before_N[before.rollout_N == original])


def test_scores_without_a_graph_are_bit_identical_to_those_with_one(prepared_model):
    (layout,) = pack([([1, 2, 3], [[4, 5], [6], [7, 8, 9]])], share_prompt=True, max_tokens=99)
    with torch.no_grad():
        without = score(prepared_model, layout).logprobs_N
    assert torch.equal(score(prepared_model, layout).logprobs_N, without)


class SmallDecoder(torch.nn.Module):
    """Two layers in fp64 throughout; transformers' norms and rotary embeddings round to fp32 on the way."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int = 8, width: int = 24, vocab_size: int = 40):
        super().__init__()
        self.head_dim = head_dim
        self.embedding = torch.nn.Embedding(vocab_size, width)
        shapes = [(num_heads + 2 * num_kv_heads) * head_dim, num_heads * head_dim]
        self.inputs = torch.nn.ModuleList(torch.nn.Linear(width, shapes[0]) for _ in range(2))
        self.outputs = torch.nn.ModuleList(torch.nn.Linear(shapes[1], width) for _ in range(2))
        self.split = [num_heads, num_kv_heads, num_kv_heads]
        self.double()

    def forward(self, token_ids_T: Tensor, position_ids_T: Tensor, attend) -> Tensor:
        hidden = self.embedding(token_ids_T)
        frequencies = 10.0 ** -torch.arange(self.head_dim // 2, dtype=torch.float64)
        angles = position_ids_T[:, None, None] * frequencies
        for into, out_of in zip(self.inputs, self.outputs, strict=True):
            heads = into(F.layer_norm(hidden, hidden.shape[-1:])).unflatten(-1, (-1, self.head_dim))
            query, key, value = heads.split(self.split, dim=1)
            query, key = (self._rotate(tensor, angles) for tensor in (query, key))
            mixed = attend(*(tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)))
            hidden = hidden + torch.tanh(out_of(mixed[0].transpose(0, 1).flatten(1)))
        return F.layer_norm(hidden, hidden.shape[-1:]) @ self.embedding.weight.T

    def _rotate(self, heads: Tensor, angles: Tensor) -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )


def plain_causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("kernel", [merged_flash_attention, looped_attention])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@quick
@given(groups=groups_of_rollouts)
def test_in_fp64_packed_rows_equal_separate_sequences_to_ten_digits(kernel, num_kv_heads, groups):
    groups = [([t % 40 for t in prompt], [[t % 40 for t in c] for c in completions]) for prompt, completions in groups]
    torch.manual_seed(0)
    decoder = SmallDecoder(num_heads=4, num_kv_heads=num_kv_heads)
    (layout,) = pack(groups, share_prompt=True, max_tokens=10_000)
    plan = AttentionPlan(layout.blocks)
    logits = decoder(
        layout.token_ids_T, layout.position_ids_T, lambda query, key, value: kernel(query, key, value, plan, 8**-0.5)
    )
    actual_N = logits[layout.predictor_N].log_softmax(-1).gather(1, layout.target_N[:, None]).squeeze(1)
    pieces: list[Tensor] = []
    for prompt, completions in groups:
        for completion in completions:
            token_ids = torch.tensor([*prompt, *completion])
            logits = decoder(token_ids, torch.arange(len(token_ids)), plain_causal)[len(prompt) - 1 : -1]
            pieces.append(logits.log_softmax(-1).gather(1, token_ids[len(prompt) :, None]).squeeze(1))
    expected_N = torch.cat(pieces)
    assert (actual_N - expected_N).abs().max() < 1e-10
    assert relative_error(gradients(decoder, actual_N), gradients(decoder, expected_N)) < 1e-10


@pytest.fixture
def two_threads():
    """A real model in fp64 keeps both busy."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.pretrained
@pytest.mark.timeout(
    900
)  # less than one minute on a quiet machine; threads that wait for each other suffer from a busy one
def test_packed_rows_equal_separate_sequences_on_smollm2(one_by_one, two_threads):
    """Separate sequences go through the same trainer, and through transformers' own attention.

    In fp32 this model rounds: in plain transformers separate sequences are 3e-5 away from fp64, packed ones no further, by
    how much depends on the processor. So the exact comparison with transformers is made in fp64; in fp32 its tolerance is
    those 3e-5, and the gradient is compared as a whole instead of parameter by parameter.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from polyrhythm.weights.pretrained import resolve_model

    folder = resolve_model("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [
        ("12+30=42\n45+17=62\n23+41=64\n36+58=", ["94\n", "93\n", "8", "100\n"]),
        ("In spring the meadows beside the river are flooded, and", [" nothing grows before the end of May.", " they"]),
    ]
    groups = [(tokenizer(prompt).input_ids, [tokenizer(text).input_ids for text in texts]) for prompt, texts in texts]
    (layout,) = pack(groups, share_prompt=True, max_tokens=999)
    for dtype, tolerance in ((torch.float32, 3e-5), (torch.float64, 5e-6)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        assert prepare_model(model, "always")
        expected_N = one_by_one(model, groups, layout)
        expected_gradients = gradients(model, expected_N)
        actual_N = score(model, layout).logprobs_N
        assert (actual_N - expected_N).abs().max() <= tolerance
        actual_gradients = gradients(model, actual_N)
        rows = [
            pack([(prompt, [one])], share_prompt=False, max_tokens=999)[0] for prompt, many in groups for one in many
        ]
        separate_N = torch.cat([score(model, row).logprobs_N for row in rows])
        assert (actual_N - separate_N).abs().max() < 5e-6
        assert relative_error(actual_gradients, gradients(model, separate_N)) < 1e-5
        if dtype == torch.float32:
            actual_gradients, expected_gradients = [flat(actual_gradients)], [flat(expected_gradients)]
        assert relative_error(actual_gradients, expected_gradients) < 1e-5


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
