"""What a script gives becomes the configuration that a file would have given."""

from typing import get_type_hints

import pytest

import polyrhythm
from polyrhythm import Config, RolloutConfig, TaskConfig, TrainingConfig
from polyrhythm.errors import UserError
from polyrhythm.runs.arguments import ConfigKeys, request_of, rewards_of

ROWS = [{"prompt": "2+2=", "answer": "4"}]


def request(**given):
    names = ("model", "dataset", "rewards", "reward_weights", "config")
    keys = {key: value for key, value in given.items() if key not in names}
    given["rewards"] = rewards_of(given.get("rewards"))
    return request_of(*(given.get(name) for name in names), keys)


def mistake(**given) -> str:
    with pytest.raises(UserError) as caught:
        request(**given)
    return str(caught.value)


def test_every_public_name_is_there():
    assert all(getattr(polyrhythm, name) is not None for name in polyrhythm.__all__)


def test_every_key_of_a_configuration_is_a_keyword_argument_that_editors_complete():
    assert get_type_hints(ConfigKeys).keys() == Config.model_fields.keys() - {"model"}


def test_a_configuration_that_a_script_makes_explains_mistakes_as_for_a_file():
    with pytest.raises(UserError, match=r"unknown key num_generations: here it is rollout\.group_size"):
        RolloutConfig(num_generations=8)
    with pytest.raises(UserError, match=r"rollout\.group_size=1 leaves no group to compare with"):
        Config(rollout=RolloutConfig(group_size=1))
    with pytest.raises(UserError, match=r"learning_rate=-1 is not valid") as caught:
        TrainingConfig(learning_rate=-1, warmup_steps="many")
    assert len(str(caught.value).splitlines()) == 2


def test_a_section_is_an_object_or_a_dict():
    as_object = request(model="m", rollout=RolloutConfig(group_size=4), num_steps=7)
    as_dict = request(model="m", rollout={"group_size": 4}, num_steps=7)
    assert as_object.config == as_dict.config == Config(model="m", num_steps=7, rollout=RolloutConfig(group_size=4))


def test_keys_are_above_the_config_and_leave_alone_what_they_do_not_set():
    config = Config(num_steps=3, training=TrainingConfig(learning_rate=1e-3, warmup_steps=2))
    merged = request(config=config, training=TrainingConfig(warmup_steps=5)).config
    assert (merged.num_steps, merged.training.learning_rate, merged.training.warmup_steps) == (3, 1e-3, 5)


def test_a_dataset_is_rows_a_path_or_the_class_of_a_task(tmp_path):
    assert request(dataset=ROWS).rows == ROWS
    by_path = request(dataset=tmp_path / "rows.jsonl")
    assert by_path.rows is None and by_path.config.task.options == {"path": str(tmp_path / "rows.jsonl")}
    from polyrhythm.tasks.addition import Addition

    assert request(dataset=Addition).config.task == TaskConfig(name="polyrhythm.tasks.addition:Addition")
    assert "dataset is a int: give a list of dicts" in mistake(dataset=3)


def test_options_of_the_dataset_are_given_as_those_of_the_task():
    options = request(dataset="rows.jsonl", task={"options": {"prompt_key": "question"}}).config.task.options
    assert options == {"path": "rows.jsonl", "prompt_key": "question"}


def test_rewards_are_one_or_several():
    assert request(rewards="my_rewards:score").config.reward.functions == ["my_rewards:score"]
    weighted = request(rewards=["a:f", "b:g"], reward_weights=[1.0, 0.5]).config.reward
    assert (weighted.functions, weighted.weights) == (["a:f", "b:g"], [1.0, 0.5])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"args": 1}, "args is called config here"),
        ({"config": 3}, "config=3 is not a polyrhythm.Config"),
        ({"model": object()}, "model is a object: give the folder of a model"),
        ({"num_generations": 8}, "rollout.group_size"),
        ({"num_step": 8}, "did you mean num_steps?"),
        ({"reward_funcs": []}, "reward_funcs is called rewards here"),
        ({"rewards": [3]}, "rewards[0] is 3: give a function, or the name of one"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size=1 leaves no group to compare with"),
        ({"rollout": {"n": 8}}, "rollout.group_size"),
        ({"train_dataset": []}, "train_dataset is called dataset here"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key_and_the_fix(given, said):
    assert said in mistake(**given) and "\n" not in mistake(**given)
