"""A checkpoint as a model folder: what a step has learnt, for transformers and for our engine."""

from pathlib import Path

import torch

from polyrhythm.training.checkpoint import POLICY
from polyrhythm.training.policy.saving import save_policy
from polyrhythm.training.policy.tri_model import load_policy
from polyrhythm.weights.export import named_weights
from polyrhythm.weights.store import WeightStore


def export_checkpoint(checkpoints: Path, step: int, model_dir: Path, target: Path, save_dtype: str) -> str:
    """Write the policy of a step into `target`; the number format it has. `model_dir` is what the run began with.

    Every digest is checked, so that a checkpoint that a live run replaces meanwhile is a SnapshotError.
    """
    policy = load_policy(model_dir, torch.device("cpu"))
    weights = {f"{POLICY}{name}": tensor for name, tensor in named_weights(policy).items()}
    WeightStore(checkpoints).load_part_into(weights, step)
    return save_policy(policy, model_dir, target, save_dtype)
