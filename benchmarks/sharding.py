"""Publication from four shards against one rank and against `full_tensor()`, and memory of a rank in every mode. JSON last.

Publication is what a rank of a run does, without the probe: rows into one file, digests, manifest, rename. Memory is that of a
training step with few tokens, so that weights, gradients and moments are what is seen: the bytes of all tensors, looked at
in the passes of the first, the middle and the last layer, and the resident memory of the process above what it had before the policy was loaded.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from measuring import status_megabytes
from rank_processes import add_rank_arguments, make_group, meet, roomy_place, run_ranks

from polyrhythm.weights.pretrained import resolve_model

RANKS = {"replicate": 1, "shard_state": 4, "shard": 4}
"""A replicated rank alone takes what each of four would."""
NUM_PUBLICATIONS = 7
MEGA = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--short", action="store_true", help="the same: it takes two minutes")
    add_rank_arguments(parser)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(measure(options)))
        return
    resolve_model(options.model)
    said: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(dir=roomy_place()) as place:
        for mode, num_ranks in RANKS.items():
            said[mode] = run_ranks(
                __file__, ["--model", options.model], num_ranks, Path(place) / mode, parallel=mode
            )  # fmt: skip
            print(f"{mode:11} {said[mode][0]}", flush=True)
    print(json.dumps(summary(said) | {"model": options.model}))


def summary(said: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    one_s = median(said["replicate"][0]["publish_s"])
    four_s = median(max(times) for times in zip(*(rank["publish_s"] for rank in said["shard"]), strict=True))
    full_s = median(max(times) for times in zip(*(rank["full_tensor_s"] for rank in said["shard"]), strict=True))
    return {
        "publish_one_rank_s": round(one_s, 3),
        "publish_four_shards_s": round(four_s, 3),
        "full_tensor_s": round(full_s, 3),
        "four_over_one": round(four_s / one_s, 2),
        "full_tensor_over_four": round(full_s / four_s, 1),
        "memory_mb": {mode: _memory(ranks) for mode, ranks in said.items()},
    }


def _memory(ranks: list[dict[str, Any]]) -> dict[str, int]:
    names = ("formula_mb", "tensors_mb", "rss_mb", "publishing_mb", "share_and_a_tensor_mb")
    return {name: round(max(rank[name] for rank in ranks)) for name in names}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from polyrhythm.config import load_config
    from polyrhythm.training.parallel.ranks import leave_ranks
    from polyrhythm.training.policy.tri_model import load_policy
    from polyrhythm.training.trainer import Trainer
    from polyrhythm.weights.store import WeightStore

    training = {"num_ranks": options.num_ranks, "parallel": options.parallel}
    config = load_config([], {"num_steps": 2, "training": training})
    replica = meet(options, config.training)
    policy = load_policy(resolve_model(options.model))
    count = sum(parameter.numel() for parameter in policy.parameters())
    largest = max(parameter.nbytes for parameter in policy.parameters())
    before_mb = status_megabytes("VmRSS") - 4 * count / 2**20
    trainer = Trainer(config, policy, replica=replica)
    del policy
    rss_mb, tensors = 0.0, PeakOfTensors(trainer.policy)
    for version in range(2):  # the first makes the moments
        Path("/proc/self/clear_refs").write_text("5")
        one_step(trainer, version, tensors)
        rss_mb = status_megabytes("VmHWM") - before_mb
    said = {
        "formula_mb": formula(options.parallel, options.num_ranks, trainer, count) / MEGA,
        "tensors_mb": tensors.peak / MEGA,
        "rss_mb": rss_mb * 2**20 / MEGA,
        "share_and_a_tensor_mb": (4 * count / options.num_ranks + largest) / MEGA,
    }
    tensors.close()
    store = WeightStore(options.folder / "weights")
    Path("/proc/self/clear_refs").write_text("5")
    before_mb = status_megabytes("VmRSS")
    times = [timed(lambda v=v: publish(store, trainer, v), replica) for v in range(NUM_PUBLICATIONS)]
    said["publishing_mb"] = (status_megabytes("VmHWM") - before_mb) * 2**20 / MEGA
    said["publish_s"] = times[3:]  # those before make the files that are used again
    with torch.no_grad():
        said["full_tensor_s"] = [timed(lambda: gather_all(trainer), replica) for _ in range(3)]
    leave_ranks()
    return said


def formula(parallel: str, num_ranks: int, trainer: Any, count: int) -> float:
    from transformers.modeling_layers import GradientCheckpointingLayer

    if parallel == "replicate":
        return 16 * count
    if parallel == "shard_state":
        return (8 + 16 / num_ranks) * count
    layers = [m for m in trainer.policy.modules() if isinstance(m, GradientCheckpointingLayer)]
    in_layers = sum(p.numel() for layer in layers for p in layer.parameters())
    return 16 / num_ranks * count + 8 * (count - in_layers + in_layers / len(layers))


def one_step(trainer: Any, version: int, tensors: "PeakOfTensors") -> None:
    from polyrhythm.types import MicroBatch

    group = make_group(version, 0)
    trainer.begin_step(version)
    trainer.forward_backward(MicroBatch(version, [group], [[1.0, -1.0] * (len(group.rollouts) // 2)]))
    tensors.look()
    trainer.optim_step()
    tensors.look()


class PeakOfTensors:
    """The most bytes that all tensors had together when it looked."""

    def __init__(self, model: Any):
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.peak = 0
        self._hooks = []
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        for layer in (layers[0], layers[len(layers) // 2], layers[-1]):  # a look takes half a second
            self._hooks.append(layer.register_forward_hook(self.look))
            self._hooks.append(layer.register_full_backward_pre_hook(self.look))

    def look(self, *_: Any) -> None:
        import gc

        import torch

        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        tensors += [t.grad for t in tensors if type(t) is torch.nn.Parameter and t.grad is not None]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if t.device.type == "cpu"]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
        self.peak = max(self.peak, sum(storages.values()))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def publish(store: Any, trainer: Any, version: int) -> None:
    from polyrhythm.training.parallel.writing import write_together
    from polyrhythm.weights.export import exported

    write_together(store, exported(trainer.policy, trainer.replica.rows_of), version, trainer.replica.writers)


def gather_all(trainer: Any) -> None:
    """As if every rank were to write the whole model: nothing is written here."""
    for parameter in trainer.optimizer.parameters:
        if hasattr(parameter, "full_tensor"):
            parameter.full_tensor()


def timed(work: Callable[[], None], replica: Any) -> float:
    replica.gather(0)  # everybody is here
    begun_s = time.monotonic()
    work()
    return time.monotonic() - begun_s


if __name__ == "__main__":
    main()
