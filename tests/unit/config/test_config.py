"""Defaults below TOML files below flags; mistakes are one line each."""

import argparse
import json

import pytest

from polyrhythm.config import (
    Config,
    add_flags,
    load_config,
    load_resumed_config,
    read_saved_config,
    save_config,
)
from polyrhythm.config.mistakes import all_keys
from polyrhythm.errors import UserError


def flags_of(*arguments: str) -> dict:
    parser = argparse.ArgumentParser()
    source = add_flags(parser)
    return source(parsed_args=parser.parse_args(arguments))()


def test_flags_override_later_files_which_override_earlier_ones(tmp_path):
    (tmp_path / "a.toml").write_text("num_steps = 3\n[rollout]\ngroup_size = 4\nmax_tokens = 10\n")
    (tmp_path / "b.toml").write_text("[rollout]\ngroup_size = 6\n")
    config = load_config([tmp_path / "a.toml", tmp_path / "b.toml"], flags_of("--rollout.max_tokens", "20"))
    assert (config.num_steps, config.rollout.group_size, config.rollout.max_tokens) == (3, 6, 20)
    assert config.rollout.groups_per_step == Config().rollout.groups_per_step


def test_the_environment_says_nothing(monkeypatch):
    monkeypatch.setenv("NUM_STEPS", "7")
    monkeypatch.setenv("MODEL", "elsewhere")
    assert load_config([]) == Config()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rollout": {"top_p": 0.9}}, "unknown key rollout.top_p: completions drawn from a filtered distribution"),
        ({"engine": {"num": 2}}, "engine.num was renamed to cluster.num_engines"),
        (
            {"conductor": {"dispatch": "problem"}},
            'conductor.dispatch = "problem" was renamed to conductor.dispatch = "in_order"',
        ),
        ({"reward": {"functions": ["my score"]}}, "reward.functions[0]='my score' is not of the form module:function"),
        ({"reward": {"functions": ["a:b", "a:b"]}}, "reward.functions has 'a:b' twice"),
        (
            {"reward": {"functions": ["a:b"], "weights": [1, 2]}},
            "are 2 weights for the 1 functions of reward.functions=['a:b']",
        ),
        ({"rollout": {"group_size": 1}}, "rollout.group_size=1 leaves no group to compare with: use at least 2"),
        ({"rollout": {"group_siz": 4}}, "unknown key rollout.group_siz: did you mean rollout.group_size?"),
        ({"rollout": 3}, "rollout=3 is not valid: rollout is a section, with the keys group_size, "),
        ({"xyz": "red"}, "unknown key xyz: known keys here are model,"),
        ({"training": {"learning_rate": -1}}, "training.learning_rate=-1 is not valid"),
        ({"schedule": "async"}, "schedule='async' is not valid: input should be 'periodic' or 'sync'"),
        ({"rollout": {"group_size": 100}}, "does not fit engine.max_batch=64"),
        ({"rollout": {"groups_per_step": 9}, "training": {"updates_per_step": 2}}, "cannot be divided into"),
        ({"engine": {"context_length": 64}}, "leaves no room for a prompt"),
        (
            {"training": {"num_ranks": 4, "ranks_per_replica": 2}},
            "training.ranks_per_replica=2 is of training.parallel=\"shard\", not of 'replicate': leave it at 0",
        ),
        (
            {"training": {"num_ranks": 4, "ranks_per_replica": 3, "parallel": "shard"}},
            "training.num_ranks=4 cannot be divided into replicas of training.ranks_per_replica=3: make it a multiple",
        ),
        (
            {"training": {"num_ranks": 4, "ranks_per_replica": 1, "parallel": "shard"}},
            'training.ranks_per_replica=1 shards nothing: use training.parallel="replicate"',
        ),
    ],
)
def test_a_mistake_names_the_key_the_value_and_the_fix(values, said):
    with pytest.raises(UserError) as error:
        load_config([], values)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("content", "said"), [("num_steps = ", "not valid TOML"), (None, "cannot read configuration")])
def test_an_unreadable_file_is_named(tmp_path, content, said):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=said) as error:
        load_config([path])
    assert "run.toml" in str(error.value)


def test_a_saved_configuration_is_read_back(tmp_path):
    config = load_config([], {"task": {"options": {"digits": 3}}, "rollout": {"stop": ["\n"]}})
    save_config(config, tmp_path / "config.json")
    assert read_saved_config(tmp_path / "config.json") == config


def test_the_saved_configuration_of_a_run_repeats_it(tmp_path):
    (tmp_path / "run.toml").write_text("num_steps = 3\n[reward]\nfunctions = ['a:b', 'c:d']\nweights = [0.1, 1e-9]\n")
    config = load_config(
        [tmp_path / "run.toml"], flags_of("--training.learning_rate", "3e-7", "--task.options", "digits=3")
    )
    save_config(config, tmp_path / "config.json")
    assert load_config([tmp_path / "config.json"]) == config
    changed = load_config([tmp_path / "config.json"], flags_of("--num_steps", "4", "--task.options", "shots=2"))
    assert changed.num_steps == 4 and changed.task.options == {"digits": "3", "shots": "2"}
    assert changed.training == config.training and changed.reward == config.reward


def test_an_old_saved_configuration_is_answered_with_the_new_names(tmp_path):
    old = Config().model_dump() | {"engine": {"num": 2, "max_restarts": 3}}
    (tmp_path / "config.json").write_text(json.dumps(old))
    with pytest.raises(UserError) as error:
        load_config([tmp_path / "config.json"])
    assert str(error.value).splitlines() == [
        "engine.num was renamed to cluster.num_engines",
        "engine.max_restarts was renamed to cluster.max_restarts",
    ]


def test_a_run_folder_is_not_a_configuration_but_holds_one(tmp_path):
    with pytest.raises(UserError, match=r"config\.json repeats the run in it, --resume"):
        load_config([tmp_path])


@pytest.mark.parametrize("amount", [-1.0, 1.5])
def test_resources_that_ray_would_refuse_are_refused_before(amount):
    with pytest.raises(UserError, match=r"training\.resources asks for GPU .*: use a whole number, or a part of 1"):
        Config.model_validate({"training": {"resources": {"GPU": amount}}})
    assert Config.model_validate({"engine": {"resources": {"GPU": 0.5, "CPU": 4}}}).engine.resources["GPU"] == 0.5


def test_what_is_learnt_cannot_change_on_resume(tmp_path):
    save_config(Config(), tmp_path / "config.json")
    (tmp_path / "run.json").write_text("{}")
    assert load_resumed_config(tmp_path, {"num_steps": 99}).num_steps == 99
    assert load_resumed_config(tmp_path, {"training": {"learning_rate": 1e-7}}).training.learning_rate == 1e-7
    assert load_resumed_config(tmp_path, {"cluster": {"num_engines": 2}}).cluster.num_engines == 2
    ranks = {"elastic": True, "max_ranks": 4, "resources": {"CPU": 2.0}}
    assert load_resumed_config(tmp_path, {"training": ranks}).training.max_ranks == 4
    assert load_resumed_config(tmp_path, {"weights": {"file_mb": 64}}).weights.file_mb == 64
    with pytest.raises(UserError, match=r"reward\.functions cannot change on --resume"):
        load_resumed_config(tmp_path, {"reward": {"functions": ["a:b"]}})
    with pytest.raises(UserError, match=r"training\.updates_per_step cannot change on --resume"):
        load_resumed_config(tmp_path, {"training": {"learning_rate": 1e-7, "updates_per_step": 2}})
    with pytest.raises(UserError, match=r"num_steps=0 is not valid"):
        load_resumed_config(tmp_path, {"num_steps": 0})
    with pytest.raises(UserError, match="not a run folder"):
        load_resumed_config(tmp_path / "nowhere", {})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
        load_resumed_config(tmp_path, {})


def test_every_key_is_known_by_its_dotted_name():
    assert {"num_steps", "rollout.group_size", "training.learning_rate", "task.options"} <= set(all_keys())
    assert "rollout" not in all_keys()
