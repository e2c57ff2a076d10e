"""Names of other projects, and of earlier versions: each is answered with the key here, or with the reason."""

import re

import pytest

from polyrhythm.config import load_config
from polyrhythm.config.mistakes import all_keys, explain_unknown
from polyrhythm.config.other_names import CALLED_HERE, NOT_HERE, RENAMED, explain_name
from polyrhythm.errors import UserError

SECTIONS = {key.partition(".")[0] for key in all_keys() if "." in key}


def mentioned_keys(text: str) -> list[str]:
    """What looks like a key of ours."""
    return [word for word in re.findall(r"\b[a-z]+\.[a-z_0-9]+\b", text) if word.partition(".")[0] in SECTIONS]


@pytest.mark.parametrize("text", [*RENAMED.values(), *CALLED_HERE.values()])
def test_what_a_name_is_called_here_is_a_key(text):
    assert text.split()[0].rstrip(",") in all_keys()


@pytest.mark.parametrize("text", sorted({*CALLED_HERE.values(), *NOT_HERE.values()}))
def test_every_key_that_an_explanation_mentions_exists(text):
    assert set(mentioned_keys(text)) <= set(all_keys())


def test_no_key_of_ours_is_taken_for_a_foreign_one():
    assert not [key for key in all_keys() if explain_name(key)]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("training.lr", "unknown key training.lr: here it is training.learning_rate"),
        ("lr", "here it is training.learning_rate"),
        ("beta", "here it is algorithm.kl_coef"),
        ("num_generations", "here it is rollout.group_size"),
        ("num-generations", "here it is rollout.group_size"),
        ("epsilon", "here it is algorithm.clip_low and algorithm.clip_high"),
        ("epsilon_high", "here it is algorithm.clip_high"),
        ("report_to", "here it is observe.loggers"),
        ("max_completion_length", "here it is rollout.max_tokens"),
        ("per_device_train_batch_size", "training.tokens_per_micro_batch"),
        ("gradient_accumulation_steps", "training.tokens_per_micro_batch"),
        ("actor_rollout_ref.rollout.n", "here it is rollout.group_size"),
        ("actor_rollout_ref.actor.optim.lr", "here it is training.learning_rate"),
        ("critic.optim.lr", "there is no critic"),
        ("save_steps", "here it is training.checkpoint_every"),
        ("logging_steps", "metrics.jsonl"),
        ("vllm_gpu_memory_utilization", "options of vLLM itself go into the table engine.options"),
        ("use_vllm", 'engine.kind = "vllm"'),
        ("num_iterations", "trained on once"),
        ("loss_type", "here it is algorithm.aggregation"),
        ("scale_rewards", "here it is algorithm.advantage"),
        ("rollout.top_p", "off-policy"),
        ("temperature", "did you mean rollout.temperature?"),
        ("training.group_size", "did you mean rollout.group_size?"),
        ("threads", "did you mean engine.threads or training.threads?"),
        ("learning_rat", "did you mean training.learning_rate?"),
        ("rollouts.max_token", "did you mean rollout.max_tokens?"),
        ("rollout.zzz", "known keys here are group_size, groups_per_step"),
        ("zzz.zzz", "the sections are task, prompt, rollout, reward"),
    ],
)
def test_a_name_of_elsewhere_is_answered_in_one_line(key, said):
    explained = explain_unknown(key)
    assert said in explained and key in explained and "\n" not in explained


def test_a_nested_table_of_another_project_is_explained_key_by_key(tmp_path):
    (tmp_path / "verl.toml").write_text(
        "[actor_rollout_ref.rollout]\nn = 8\n[actor_rollout_ref.actor]\nclip_ratio_high = 0.28\n"
    )
    with pytest.raises(UserError) as error:
        load_config([tmp_path / "verl.toml"])
    assert str(error.value).splitlines() == [
        "unknown key actor_rollout_ref.rollout.n: here it is rollout.group_size",
        "unknown key actor_rollout_ref.actor.clip_ratio_high: here it is algorithm.clip_high",
    ]


def test_an_assignment_instead_of_a_flag_is_explained(tmp_path):
    for given, said in (
        ("actor_rollout_ref.rollout.n=8", "here it is rollout.group_size"),
        ("num_steps=3", "--num_steps 3"),
    ):
        with pytest.raises(UserError, match=said):
            load_config([tmp_path.__class__(given)])
