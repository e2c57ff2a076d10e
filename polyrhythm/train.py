"""The loop: the whole method in one page. `python -m polyrhythm.train --run RUN` is one trainer rank.

Inference and training run at the same time, in processes of their own, and meet on the beat: once per step the new weights
reach every engine, all rollouts of the step come from exactly those weights, and the trainer adds up gradients over
each group as soon as it is finished, while the others are still being generated. One update closes the step.
"""

from pathlib import Path

from polyrhythm.config import Config
from polyrhythm.loader import RolloutLoader
from polyrhythm.observe.lane import Lane
from polyrhythm.training.trainer import Trainer
from polyrhythm.weights.store import WeightStore


def train(loader: RolloutLoader, trainer: Trainer, store: WeightStore, lane: Lane) -> None:
    for step in loader.steps():  # engines hold policy v{step.version}, verified
        trainer.begin_step(step.version)
        for update in step.updates():  # one, unless training.updates_per_step says more
            for micro_batch in update:  # finished groups, as they finish
                trainer.forward_backward(micro_batch)  # engines keep generating meanwhile
            trainer.optim_step()  # divide by the totals, clip, update
        with lane.doing("publish"):
            store.publish(trainer.policy, version=step.version + 1)
        step.commit(trainer.metrics() | _times(lane))  # ledger, cursor and metrics move together


def run_trainer(
    config: Config, run_dir: Path, model_dir: Path, conductor_url: str, token: str, store_root: Path
) -> None:
    """Start one rank: load the policy, publish it as v0, train, and save what was learnt in the run folder."""
    from transformers import AutoTokenizer

    from polyrhythm.loader.client import ConductorClient
    from polyrhythm.training.models import load_policy

    client = ConductorClient(conductor_url, token)
    lane = Lane("trainer", client.report)
    with lane.doing("start"):
        trainer = Trainer(config, load_policy(model_dir), lane)
        store = WeightStore(store_root, keep=config.weights.keep)
        store.publish(trainer.policy, version=0)
    train(RolloutLoader(client, config, lane=lane), trainer, store, lane)
    with lane.doing("save"):
        trainer.policy.save_pretrained(run_dir / "model")
        AutoTokenizer.from_pretrained(model_dir).save_pretrained(run_dir / "model")


def _times(lane: Lane) -> dict[str, float]:
    return {f"time/trainer_{what}_s": seconds for what, seconds in lane.take_seconds().items()}
