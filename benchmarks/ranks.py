"""One training step by one rank, by two ranks with as many threads each, and by one rank with the threads of both. JSON last.

The groups are there from the start, so that training alone is measured: forward and backward passes, adding up gradients,
the update, and the check that all ranks hold the same weights.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from rank_processes import COMPLETION, GROUP_SIZE, add_rank_arguments, make_group, meet, roomy_place, run_ranks

from polyrhythm.observe.activity import Activity
from polyrhythm.weights.pretrained import resolve_model

MODES = {"one_rank": (1, 1), "two_ranks": (2, 1), "one_rank_two_threads": (1, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="two turns")
    add_rank_arguments(parser)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(measure(options)))
        return
    resolve_model(options.model)
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(dir=roomy_place()) as place:
        for turn in range(2 if options.short else options.turns):
            for mode in MODES:
                rows[mode].append(launch(mode, options, Path(place)))
                print(f"turn {turn + 1}  {mode:21} {rows[mode][-1]['step_s']:6.2f} s", flush=True)
        error = gradient_error(Path(place))
    print(json.dumps(summary(rows) | {"max_gradient_error": error, "groups": options.groups, "model": options.model}))


def summary(rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    seconds = {mode: median(row["step_s"] for row in turns) for mode, turns in rows.items()}
    return {
        **{f"{mode}_s": round(value, 3) for mode, value in seconds.items()},
        "speedup": round(seconds["one_rank"] / seconds["two_ranks"], 3),
        "over_two_threads": round(seconds["one_rank_two_threads"] / seconds["two_ranks"], 3),
        "reduce_s": round(median(row["reduce_s"] for row in rows["two_ranks"]), 3),
        "verify_s": round(median(row["verify_s"] for row in rows["two_ranks"]), 3),
        "steps_s": {mode: [round(row["step_s"], 2) for row in turns] for mode, turns in rows.items()},
    }


def launch(mode: str, options: argparse.Namespace, root: Path) -> dict[str, float]:
    """The step takes as long as its slowest rank; adding up, without waiting for others, as long as the last to come needs."""
    num_ranks, num_threads = MODES[mode]
    arguments = ["--model", options.model, "--groups", str(options.groups)]
    rows = run_ranks(__file__, arguments, num_ranks, root / mode, threads=num_threads)
    return {
        "step_s": max(row["step_s"] for row in rows),
        "reduce_s": min(row["reduce_s"] for row in rows),
        "verify_s": max(row["verify_s"] for row in rows),
    }


def measure(options: argparse.Namespace) -> dict[str, float]:
    """The second and third step of one rank; the first warms up and leaves its gradient."""
    from safetensors.torch import save_file

    from polyrhythm.config import load_config
    from polyrhythm.loader import LoaderSettings, RolloutLoader
    from polyrhythm.training.parallel.ranks import leave_ranks
    from polyrhythm.training.policy.tri_model import load_policy
    from polyrhythm.training.trainer import Trainer
    from polyrhythm.weights.export import exported
    from polyrhythm.weights.store import WeightStore

    rollout = {"groups_per_step": options.groups, "group_size": GROUP_SIZE, "max_tokens": COMPLETION}
    training = {"num_ranks": options.num_ranks}
    config = load_config([], {"num_steps": 3, "rollout": rollout, "training": training})
    replica = meet(options, config.training)
    trainer = Trainer(config, load_policy(resolve_model(options.model)), replica=replica)
    store, seconds = WeightStore(options.folder / "weights"), []
    settings = LoaderSettings.of(config, share_prompt=trainer.models.shares_prompts)
    for step in RolloutLoader(Share(options), settings, recorder=trainer.recorder).steps():
        if replica.is_writer:
            store.publish(exported(trainer.policy), step.version)
        replica.gather(step.version)  # everybody is here
        trainer.recorder.take_seconds()
        started = time.monotonic()
        trainer.begin_step(step.version)
        if not replica.is_writer:
            with trainer.recorder.doing(Activity.VERIFY):
                store.verify(exported(trainer.policy), step.version)
        for update in step.updates():
            for micro_batch in update:
                trainer.forward_backward(micro_batch)
            if step.version == 0:
                keep = _recorder(trainer, lambda tensors: save_file(tensors, options.folder / "gradient.safetensors"))
                trainer.optimizer.inner.step = keep if replica.is_writer else trainer.optimizer.inner.step
            trainer.optim_step()
        if step.version > 0:
            seconds.append({"step_s": time.monotonic() - started, **trainer.recorder.take_seconds()})
    leave_ranks()
    return {
        "step_s": median(row["step_s"] for row in seconds),
        "reduce_s": median(row.get(Activity.REDUCE, 0.0) for row in seconds),
        "verify_s": median(row.get(Activity.VERIFY, 0.0) for row in seconds),
    }


class Share:
    """A source that has all groups of a rank's share at once, dealt in turn."""

    def __init__(self, options: argparse.Namespace):
        self.options = options

    def wait_for_engines(self, version: int, deadline_s: float) -> None: ...

    def groups(self, version: int, offset: int, until: int, wait_s: float):
        from polyrhythm.messages import GroupsReply

        mine = range(self.options.rank, self.options.groups, self.options.num_ranks)
        return GroupsReply(groups=[make_group(version, position) for position in mine][offset:], is_last=True)

    def published(self, version: int, metrics: dict[str, float]) -> None: ...


def _recorder(trainer, save):
    """AdamW's step, which first keeps the gradient it is given; once."""
    update = trainer.optimizer.inner.step

    def record_and_update():
        named = zip(trainer.optimizer.names, trainer.optimizer.parameters, strict=True)
        save({name: parameter.grad.clone() for name, parameter in named})
        trainer.optimizer.inner.step = update
        update()

    return record_and_update


def gradient_error(place: Path) -> float:
    """How far the gradient of two ranks is from that of one, relative to its norm, after division and clipping."""
    import torch
    from safetensors.torch import load_file

    one, two = (load_file(place / mode / "gradient.safetensors") for mode in ("one_rank", "two_ranks"))
    difference = torch.stack([(one[name] - two[name]).norm() for name in one]).norm()
    return float(difference / torch.stack([tensor.norm() for tensor in one.values()]).norm())


if __name__ == "__main__":
    main()
