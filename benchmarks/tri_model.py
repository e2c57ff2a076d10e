"""Peak memory of one, two and three models in the training engine, each in a process of its own. JSON last."""

import argparse
import json
import resource
import subprocess
import sys

from polyrhythm.weights.pretrained import resolve_model

VARIANTS = {
    "policy": {},
    "policy + reference": {"algorithm": {"kl_coef": 0.05}},
    "policy + reference + old policy": {"algorithm": {"kl_coef": 0.05}, "training": {"updates_per_step": 2}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--short", action="store_true", help="the same: this benchmark is short")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.model, options.variant)))
        return
    rows = []
    for variant in VARIANTS:
        command = [sys.executable, __file__, "--model", options.model, "--variant", variant]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{variant:35} {rows[-1]['peak_mb']:7.0f} MB")
    print(json.dumps({"rows": rows}))


def measure(model: str, variant: str) -> dict[str, float | str]:
    """One step of 8 groups of 8 completions (51 prompt tokens, 4 completion tokens), all of them trained on."""
    from polyrhythm.config import load_config
    from polyrhythm.training.policy.tri_model import load_policy
    from polyrhythm.training.trainer import Trainer
    from polyrhythm.types import Completion, Group, MicroBatch, Rollout, Trace

    config = load_config([], {"rollout": {"groups_per_step": 8, "group_size": 8, "max_tokens": 4}, **VARIANTS[variant]})
    trainer = Trainer(config, load_policy(resolve_model(model)))
    trace = Trace.of(Completion(token_ids=[32, 33, 34, 35], rollout_logprobs=[-1.0] * 4, finish_reason="stop"))
    rollouts = [Rollout(index=i, trace=trace, policy_version=0, reward=float(i % 2)) for i in range(8)]
    groups = [Group(0, position, position, list(range(100, 151)), rollouts) for position in range(8)]
    advantages = [[1.0, -1.0] * 4] * len(groups)
    trainer.begin_step(0)
    for half in (slice(0, 4), slice(4, 8)):
        trainer.forward_backward(MicroBatch(version=0, groups=groups[half], advantages=advantages[half]))
        if config.training.updates_per_step == 2 or half.stop == 8:
            trainer.optim_step()
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"models": variant, "peak_mb": peak_kb / 1024}


if __name__ == "__main__":
    main()
