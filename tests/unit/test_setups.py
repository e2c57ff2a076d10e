"""What must be the same in all processes of a run."""

import json

from polyrhythm import __version__
from polyrhythm.messages import Setup
from polyrhythm.setups import differences, setup_of


def model_folder(folder, config: dict, tokenizer: dict):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=len(config)))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_copy_of_the_model_that_was_saved_elsewhere_is_the_same_and_another_model_is_not(tmp_path):
    words = {"added_tokens": [], "model": {"vocab": {"a": 0}}}
    one = setup_of(model_folder(tmp_path / "a", {"hidden_size": 8, "dtype": "float32"}, words | {"truncation": None}))
    copy = {"transformers_version": "5.0", "hidden_size": 8, "dtype": "bfloat16"}
    same = setup_of(model_folder(tmp_path / "b", copy, words | {"truncation": {"max_length": 9}}))
    assert one == same and one.package == __version__ and "+" not in one.torch
    wider = setup_of(model_folder(tmp_path / "c", {"hidden_size": 9}, words))
    assert differences(wider, one, with_torch=True) == "its model is another one than the run's, by config.json"
    other_words = setup_of(model_folder(tmp_path / "d", {"hidden_size": 8}, {"added_tokens": [], "model": {}}))
    assert differences(other_words, one, with_torch=True).endswith("by tokenizer.json")


def test_a_folder_without_a_tokenizer_does_not_pass_for_one_that_has_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert setup_of(tmp_path).model["tokenizer.json"] == "none"


def test_torch_counts_among_those_who_add_up_gradients():
    ours, theirs = Setup("1", "2.13.0", {}), Setup("1", "2.12.0", {})
    assert differences(theirs, ours, with_torch=False) == "" == differences(ours, ours, with_torch=True)
    assert differences(theirs, ours, with_torch=True) == "it has torch 2.12.0, the run has 2.13.0"
