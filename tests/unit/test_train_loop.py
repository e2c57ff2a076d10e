"""The loop as a rank that is not the first runs it: it proves its weights, and leaves speaking to the first."""

import pytest
import torch

from polyrhythm.config import load_config
from polyrhythm.loader import LoaderSettings, RolloutLoader
from polyrhythm.loop import train
from polyrhythm.observe.recorder import ActivityRecorder
from polyrhythm.training.checkpoint import Checkpoints
from polyrhythm.training.parallel.replicate import WholeReplica
from polyrhythm.training.publication import Publication
from polyrhythm.training.trainer import Trainer
from polyrhythm.weights.export import exported
from polyrhythm.weights.store import SnapshotError, WeightStore
from tests.conftest import ScriptedSource, build_tiny_model, make_group


class Follower(WholeReplica):
    """A rank that is not the first, without others."""

    def __init__(self):
        super().__init__(index=1, num=1)


def run_follower(tmp_path, policy) -> tuple[Trainer, ScriptedSource]:
    """One step of a run whose first rank has published the tiny model as version 0."""
    rollout = {"group_size": 4, "groups_per_step": 2, "max_tokens": 9}
    config = load_config([], {"num_steps": 1, "rollout": rollout, "training": {"checkpoint_every": 1}})
    store = WeightStore(tmp_path / "weights")
    store.publish(exported(build_tiny_model("llama")), version=0)
    trainer = Trainer(config, policy, replica=Follower())
    source = ScriptedSource([[make_group(0), make_group(1)]])
    loader = RolloutLoader(source, LoaderSettings.of(config, share_prompt=True))
    checkpoints = Checkpoints(tmp_path / "checkpoints", trainer)
    train(loader, trainer, Publication(store, trainer), checkpoints, ActivityRecorder("trainer-1"))
    return trainer, source


def test_a_rank_that_is_not_the_first_trains_and_leaves_the_rest_to_the_first(tmp_path):
    trainer, source = run_follower(tmp_path, build_tiny_model("llama"))
    assert trainer.optimizer.num_updates == 1
    assert "published 1" not in source.events
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v00000000"]
    assert not (tmp_path / "checkpoints").exists()


def test_a_rank_whose_weights_differ_in_one_bit_is_found_before_it_trains(tmp_path):
    policy = build_tiny_model("llama")
    with torch.no_grad():
        weight = policy.model.layers[1].mlp.down_proj.weight
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(1.0))
    with pytest.raises(
        SnapshotError, match=r"layers\.1\.mlp\.down_proj\.weight of weights v0 is not what was published"
    ):
        run_follower(tmp_path, policy)
