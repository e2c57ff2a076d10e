"""Two ranks, one of which is three times slower, take groups by demand: how long each waits for the other. JSON last.

A rank is busy from the beginning of the step until it has nothing left to train on. What it waits then for the slower one is
idle; the exchange of gradients and the update are work of both. Groups are there from the start.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from types import MethodType
from typing import Any

from rank_processes import COMPLETION, GROUP_SIZE, PROMPT, add_rank_arguments, make_group, meet, roomy_place, run_ranks

from polyrhythm.weights.pretrained import resolve_model

MODES = ("replicate", "shard_state")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--groups", type=int, default=48)
    parser.add_argument("--slower", type=float, default=3.0, help="how many times slower the second rank is")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="one turn of 24 groups")
    add_rank_arguments(parser)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(measure(options)))
        return
    resolve_model(options.model)
    num_groups = 24 if options.short else options.groups
    arguments = ["--model", options.model, "--groups", str(num_groups), "--slower", str(options.slower)]
    shares: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(dir=roomy_place()) as place:
        for turn in range(1 if options.short else options.turns):
            for mode in MODES:
                ranks = run_ranks(__file__, arguments, 2, Path(place) / f"{mode}{turn}", parallel=mode)
                shares[mode].append(busy_shares(ranks))
                print(f"turn {turn + 1}  {mode:11} {shares[mode][-1]}", flush=True)
    print(json.dumps(summary(shares) | {"groups": num_groups, "slower": options.slower, "model": options.model}))


def summary(shares: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        mode: {
            "busy": [round(median(turn["busy"][rank] for turn in turns), 3) for rank in (0, 1)],
            "groups_of_the_slow_rank": median(turn["groups"][1] for turn in turns),
            "step_s": round(median(turn["step_s"] for turn in turns), 2),
        }
        for mode, turns in shares.items()
    }


def busy_shares(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Clocks are those of one machine. Of the last step: those before it warm up."""
    begun, ended = min(rank["begun_s"] for rank in ranks), max(rank["ended_s"] for rank in ranks)
    last_to_come = max(rank["trained_s"] for rank in ranks)
    busy = [1 - (last_to_come - rank["trained_s"]) / (ended - begun) for rank in ranks]
    return {"busy": busy, "groups": [rank["groups"] for rank in ranks], "step_s": ended - begun}


def measure(options: argparse.Namespace) -> dict[str, float]:
    from polyrhythm.config import load_config
    from polyrhythm.loader import LoaderSettings, RolloutLoader
    from polyrhythm.training.parallel.ranks import leave_ranks
    from polyrhythm.training.policy.tri_model import load_policy
    from polyrhythm.training.trainer import Trainer

    rollout = {"groups_per_step": options.groups, "group_size": GROUP_SIZE, "max_tokens": COMPLETION}
    training = {
        "num_ranks": options.num_ranks,
        "parallel": options.parallel,
        "tokens_per_micro_batch": PROMPT + GROUP_SIZE * COMPLETION,
    }
    config = load_config([], {"num_steps": 2, "rollout": rollout, "training": training})
    replica = meet(options, config.training)
    trainer = Trainer(config, load_policy(resolve_model(options.model)), replica=replica)
    if options.rank == 1:
        slow_down(trainer, options.slower)
    settings = LoaderSettings.of(config, share_prompt=trainer.models.shares_prompts)
    times: dict[str, float] = {}
    for step in RolloutLoader(ByDemand(options.groups), settings, recorder=trainer.recorder, shards=replica).steps():
        replica.gather(step.version)  # everybody is here
        times = {"begun_s": time.monotonic(), "groups": 0}
        trainer.begin_step(step.version)
        for update in step.updates():
            for micro_batch in update:
                trainer.forward_backward(micro_batch)
                times["groups"] += len(micro_batch.groups)
            times["trained_s"] = time.monotonic()
            trainer.optim_step()
        times["ended_s"] = time.monotonic()
    leave_ranks()
    return times


def slow_down(trainer: Any, times: float) -> None:
    """Each pass sleeps until it has taken so many times as long."""
    forward_backward = type(trainer).forward_backward

    def slowly(self: Any, micro_batch: Any) -> None:
        begun_s = time.monotonic()
        forward_backward(self, micro_batch)
        time.sleep((times - 1) * (time.monotonic() - begun_s))

    trainer.forward_backward = MethodType(slowly, trainer)


class ByDemand:
    """One group for whoever asks, of those that nobody has yet: a counter that the ranks share, as the conductor has one."""

    def __init__(self, num_groups: int):
        import torch.distributed as dist

        self._num_groups = num_groups
        self._counter = dist.distributed_c10d._get_default_store()
        self._is_last = False

    def wait_for_engines(self, version: int, deadline_s: float) -> None:
        self._is_last = False

    def groups(self, version: int, offset: int, until: int, wait_s: float):
        from polyrhythm.messages import GroupsReply

        position = self._counter.add(f"groups of {version}", 1) - 1
        if position >= self._num_groups:
            return GroupsReply(groups=[], is_last=True)
        return GroupsReply(groups=[make_group(version, position)], is_last=False)

    def published(self, version: int, metrics: dict[str, float]) -> None: ...


if __name__ == "__main__":
    main()
