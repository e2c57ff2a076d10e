import copy

import pytest
import torch

from polyrhythm.config import load_config
from polyrhythm.errors import RunError
from polyrhythm.training.checkpoint import Checkpoints
from polyrhythm.training.trainer import Trainer
from polyrhythm.types import MicroBatch
from polyrhythm.weights.snapshot import newest_whole_version
from tests.conftest import build_tiny_model, make_group


def one_step(trainer: Trainer, version: int) -> None:
    trainer.begin_step(version)
    group = make_group(0, step=version)
    trainer.forward_backward(MicroBatch(version=version, groups=[group], advantages=[[1.0, -1.0, 0.5, -0.5]]))
    trainer.optim_step()


def test_a_trainer_that_goes_on_from_a_checkpoint_ends_with_the_same_bits(tmp_path):
    config = load_config(
        [],
        {
            "num_steps": 4,
            "training": {"learning_rate": 1e-2, "warmup_steps": 2, "schedule": "cosine"},
            "algorithm": {"kl_coef": 0.1},
        },
    )
    initial = build_tiny_model("qwen3")
    whole = Trainer(config, copy.deepcopy(initial))
    for version in range(4):
        one_step(whole, version)
        if version == 1:
            Checkpoints(tmp_path, whole).save(2)

    assert newest_whole_version(tmp_path) == 2
    resumed = Trainer(config, copy.deepcopy(initial))
    Checkpoints(tmp_path, resumed).load(2)
    assert resumed.optimizer.num_updates == 2
    for version in (2, 3):
        one_step(resumed, version)
    for ours, theirs in zip(resumed.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_without_a_readable_manifest_is_passed_over(tmp_path):
    trainer = Trainer(load_config([], {}), build_tiny_model("llama"))
    checkpoints = Checkpoints(tmp_path, trainer)
    checkpoints.save(1)
    checkpoints.save(2)
    (checkpoints.store.folder(2) / "manifest.json").write_text("{")
    assert newest_whole_version(tmp_path) == 1


def test_a_torn_checkpoint_is_passed_over(tmp_path):
    trainer = Trainer(load_config([], {}), build_tiny_model("llama"))
    checkpoints = Checkpoints(tmp_path, trainer)
    checkpoints.save(1)
    checkpoints.save(2)
    with open(checkpoints.store.folder(2) / "model.safetensors", "r+b") as file:
        file.truncate(1_000)
    assert newest_whole_version(tmp_path) == 1


def test_an_altered_checkpoint_is_named_with_what_to_do(tmp_path):
    trainer = Trainer(load_config([], {}), build_tiny_model("llama"))
    checkpoints = Checkpoints(tmp_path, trainer)
    checkpoints.save(1)
    with open(checkpoints.store.folder(1) / "model.safetensors", "r+b") as file:
        file.seek(-4, 2)
        file.write(b"oops")
    with pytest.raises(RunError, match=r"digests differ: remove .*v00000001 to go on"):
        checkpoints.load(1)


def test_a_step_without_an_update_does_not_tell_the_last_one_s(tmp_path):
    trainer = Trainer(load_config([], {}), build_tiny_model("llama"))
    one_step(trainer, 0)
    assert "train/grad_norm" in trainer.metrics()
    trainer.begin_step(1)
    trainer.optim_step()
    assert "train/grad_norm" not in trainer.metrics()


def test_a_run_without_checkpoints_starts_at_the_beginning(tmp_path):
    assert newest_whole_version(tmp_path) == 0
