import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.training.packing.layout import pack
from polyrhythm.training.packing.plan import Block

TWO_GROUPS = [([10, 11, 12], [[20, 21], [30, 31, 32]]), ([13], [[40]])]

groups_of_rollouts = st.lists(
    st.tuples(
        st.lists(st.integers(0, 999), min_size=1, max_size=12),
        st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=9), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=4,
)


def test_a_shared_block_holds_the_prompt_once_and_restarts_positions_after_it():
    (layout,) = pack(TWO_GROUPS, share_prompt=True, max_tokens=100)
    assert layout.token_ids_T.tolist() == [10, 11, 12, 20, 30, 31, 13]
    assert layout.position_ids_T.tolist() == [0, 1, 2, 3, 3, 4, 0]
    assert layout.blocks == (Block(0, 3, (3, 4), (1, 2)), Block(6, 1, (), ()))


def test_the_last_prompt_token_predicts_the_first_token_of_every_completion():
    (layout,) = pack(TWO_GROUPS, share_prompt=True, max_tokens=100)
    assert layout.target_N.tolist() == [20, 21, 30, 31, 32, 40]
    assert layout.predictor_N.tolist() == [2, 3, 2, 4, 5, 6]


def test_unshared_every_completion_follows_its_own_copy_of_the_prompt():
    (layout,) = pack(TWO_GROUPS, share_prompt=False, max_tokens=100)
    assert layout.token_ids_T.tolist() == [10, 11, 12, 20, 10, 11, 12, 30, 31, 13]
    assert [block.completion_lengths for block in layout.blocks] == [(1,), (2,), ()]


def test_a_group_too_long_for_the_budget_is_split_by_completions_and_repeats_the_prompt():
    completions = [[4, 4, 9], [5, 5, 9], [6, 6, 9]]
    first, second = pack([([1, 2, 3], completions)], share_prompt=True, max_tokens=7)
    assert first.token_ids_T.tolist() == [1, 2, 3, 4, 4, 5, 5]
    assert second.token_ids_T.tolist() == [1, 2, 3, 6, 6]
    assert second.rollout_N.tolist() == [2, 2, 2]


def test_a_sequence_longer_than_the_budget_gets_a_row_of_its_own():
    rows = pack([([1] * 9, [[2, 2], [3, 3]]), ([4], [[5, 5]])], share_prompt=True, max_tokens=5)
    assert [row.num_tokens for row in rows] == [10, 10, 2]


def test_completions_of_one_token_never_repeat_a_prompt():
    (row,) = pack([([1] * 9, [[2], [3], [4]])], share_prompt=True, max_tokens=5)
    assert row.token_ids_T.tolist() == [1] * 9
    assert row.predictor_N.tolist() == [8, 8, 8]


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (([1], [[2], []]), "completion 1 of group 0 is empty"),
        (([], [[2]]), "empty prompt"),
        (([1], []), "no completions"),
    ],
)
def test_what_predicts_nothing_is_refused(group, reason):
    with pytest.raises(ValueError, match=reason):
        pack([group], share_prompt=True, max_tokens=100)


def test_the_loss_mask_takes_tokens_out_of_the_loss_but_not_out_of_the_row():
    masks = [[[True, False], [False, True, True]], [[True]]]
    (layout,) = pack(TWO_GROUPS, share_prompt=True, max_tokens=100, loss_masks=masks)
    (unmasked,) = pack(TWO_GROUPS, share_prompt=True, max_tokens=100)
    assert layout.target_N.tolist() == [20, 31, 32, 40]
    assert layout.predictor_N.tolist() == [2, 4, 5, 6]
    assert layout.sequence_N.tolist() == [0, 1, 1, 2]
    assert layout.blocks == unmasked.blocks
    assert layout.token_ids_T.equal(unmasked.token_ids_T)


def test_a_completion_without_a_token_in_the_loss_is_refused():
    with pytest.raises(ValueError, match="completion 1 of group 0 has no token in the loss"):
        pack([([1], [[2, 3], [4]])], share_prompt=True, max_tokens=100, loss_masks=[[[False, True], [False]]])


def test_a_loss_mask_of_another_length_is_refused():
    with pytest.raises(ValueError, match="one value per completion token"):
        pack([([1], [[2, 3]])], share_prompt=True, max_tokens=100, loss_masks=[[[True]]])


@settings(max_examples=60, deadline=None)
@given(groups=groups_of_rollouts, share_prompt=st.booleans(), max_tokens=st.integers(1, 60))
def test_every_completion_token_is_predicted_once_by_the_token_before_it(groups, share_prompt, max_tokens):
    seen: dict[tuple[int, int], list[int]] = {}
    for layout in pack(groups, share_prompt=share_prompt, max_tokens=max_tokens):
        longest = max(len(prompt) + len(completion) for prompt, completions in groups for completion in completions)
        assert layout.num_tokens <= max(max_tokens, longest)
        for n in range(layout.num_targets):
            group, rollout = int(layout.group_N[n]), int(layout.rollout_N[n])
            written = seen.setdefault((group, rollout), [])
            history = [*groups[group][0], *written]
            predictor = int(layout.predictor_N[n])
            assert layout.token_ids_T[predictor] == history[-1]
            assert layout.position_ids_T[predictor] == len(history) - 1
            written.append(int(layout.target_N[n]))
    assert seen == {(g, r): list(c) for g, (_, completions) in enumerate(groups) for r, c in enumerate(completions)}


@settings(max_examples=30, deadline=None)
@given(groups=groups_of_rollouts, share_prompt=st.booleans())
def test_a_row_holds_what_is_attended_to_or_predicts_and_nothing_else(groups, share_prompt):
    (layout,) = pack(groups, share_prompt=share_prompt, max_tokens=10_000)
    used = set(layout.predictor_N.tolist())
    for block in layout.blocks:
        used |= set(range(block.prompt_start, block.prompt_start + block.prompt_length))
    assert used == set(range(layout.num_tokens))
    num_prompt_tokens = sum(len(prompt) * (1 if share_prompt else len(completions)) for prompt, completions in groups)
    num_own_tokens = sum(len(completion) - 1 for _, completions in groups for completion in completions)
    assert layout.num_tokens == num_prompt_tokens + num_own_tokens
