"""`polyrhythm train` against TRL's `GRPOTrainer`: the same work on the same cores, one after the other. JSON last.

Both train the same model in fp32 on the same prompts with the same reward, one update per step on all completions. Nothing
ends a completion early: the model folder that both load is the given one with an end-of-text token the model does not draw.
A step is timed from the end of the one before to its own end, after one step of warm-up. TRL runs in an environment of
its own (environments.py makes it) with the faster of the batch sizes that are tried.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from environments import HERE, make_environment

from polyrhythm.cluster.cores import num_cores
from polyrhythm.observe.loggers.jsonl import read_metrics
from polyrhythm.tokenizer import Tokenizer
from polyrhythm.weights.pretrained import resolve_model

NUM_WARM_UP_STEPS = 1
KL_COEF = 0.04
LEARNING_RATE = 1e-6
SIDE_DEADLINE_S = 3600.0
WORDS = "the river ran under a stone bridge and we saw two small boats come slowly down from an old town".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--completion", type=int, default=32, help="tokens of a completion (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of ours (default: %(default)s)")
    parser.add_argument("--trl-steps", type=int, default=2, help="measured steps of TRL (default: %(default)s)")
    parser.add_argument(
        "--trl-batch-sizes", type=int, nargs="+", default=[8, 32],
        help="completions of one forward and backward pass of TRL to try (default: 8 32)",
    )  # fmt: skip
    parser.add_argument(
        "--short", action="store_true", help="three measured steps of ours, one of TRL, its first batch size only"
    )
    options = parser.parse_args()
    if options.short:
        options.steps, options.trl_steps = 3, 1
        options.trl_batch_sizes = options.trl_batch_sizes[:1]

    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        model_dir = endless_model(resolve_model(options.model), work / "model")
        num_problems = options.groups * (NUM_WARM_UP_STEPS + max(options.steps, options.trl_steps))
        write_problems(work / "problems.jsonl", model_dir, num_problems, options.prompt)
        sides = {kl_coef: measure_both(kl_coef, options, work, model_dir) for kl_coef in (0.0, KL_COEF)}
    print(json.dumps(summary(sides[0.0], sides[KL_COEF])))


def measure_both(kl_coef: float, options: argparse.Namespace, work: Path, model_dir: Path) -> dict[str, Any]:
    """Ours and TRL's figures with this KL coefficient; the batch size that was faster is kept for what follows."""
    ours = run_polyrhythm(kl_coef, options, work, model_dir)
    say(f"polyrhythm, KL {kl_coef}: {rounded(ours['step_s'])} s per step")
    tried = []
    for batch_size in options.trl_batch_sizes:
        trl = run_trl(kl_coef, batch_size, options, work, model_dir) | {"batch_size": batch_size}
        say(f"TRL, KL {kl_coef}, batch size {batch_size}: {rounded(trl['step_s'])} s per step")
        tried.append(trl)
    fastest = min(tried, key=lambda trl: statistics.median(trl["step_s"]))
    options.trl_batch_sizes = [fastest["batch_size"]]
    return {"ours": ours, "trl": fastest}


def run_polyrhythm(kl_coef: float, options: argparse.Namespace, work: Path, model_dir: Path) -> dict[str, Any]:
    """The real command, with its processes and its defaults."""
    output_dir = work / f"runs-{kl_coef}"
    config = work / f"run-{kl_coef}.toml"
    config.write_text(
        f"""
        model = "{model_dir}"
        num_steps = {options.steps + NUM_WARM_UP_STEPS}
        output_dir = "{output_dir}"
        task = {{ name = "dataset", options = {{ path = "{work / "problems.jsonl"}" }} }}
        reward = {{ functions = ["hash_reward:score"] }}
        rollout = {{ groups_per_step = {options.groups}, group_size = {options.group_size}, max_tokens = {options.completion} }}
        algorithm = {{ kl_coef = {kl_coef} }}
        training = {{ learning_rate = {LEARNING_RATE} }}
        observe = {{ view = "none" }}
        """
    )
    run_side([sys.executable, "-m", "polyrhythm", "train", str(config)])
    (run_dir,) = output_dir.iterdir()
    rows = read_metrics(run_dir)
    ends_s = [row["time"] for row in rows]
    measured = rows[NUM_WARM_UP_STEPS:]
    return {
        "step_s": [end - begin for begin, end in itertools.pairwise(ends_s)],
        "tokens_per_completion": statistics.fmean(row["completion/tokens_mean"] for row in measured),
    }


def run_trl(
    kl_coef: float, batch_size: int, options: argparse.Namespace, work: Path, model_dir: Path
) -> dict[str, Any]:
    flags = {
        "model": model_dir, "problems": work / "problems.jsonl", "steps": options.trl_steps + NUM_WARM_UP_STEPS,
        "groups": options.groups, "group-size": options.group_size, "completion": options.completion,
        "batch-size": batch_size, "learning-rate": LEARNING_RATE, "beta": kl_coef, "threads": num_cores(),
    }  # fmt: skip
    command = [str(make_environment("trl")), str(HERE / "trl_side.py")]
    output = run_side([*command, *(f"--{name}={value}" for name, value in flags.items())])
    trl = json.loads(output.splitlines()[-1])
    return trl | {"step_s": trl["step_s"][NUM_WARM_UP_STEPS:]}


def run_side(command: list[str]) -> str:
    """Its output. This folder is on the path of our side too, for the reward."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=SIDE_DEADLINE_S
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def endless_model(given: Path, folder: Path) -> Path:
    """A folder with the weights of the given one, whose end-of-text token is a special token that nobody draws."""
    folder.mkdir()
    for path in given.iterdir():
        (folder / path.name).symlink_to(path)
    special = [token for token in read_json(given / "tokenizer.json")["added_tokens"] if token["special"]]
    never_drawn = special[-1]
    for name, value in (
        ("config.json", never_drawn["id"]),
        ("generation_config.json", never_drawn["id"]),
        ("tokenizer_config.json", never_drawn["content"]),
    ):
        key = "eos_token" if name.startswith("tokenizer") else "eos_token_id"
        changed = read_json(given / name) | {key: value}
        (folder / name).unlink()
        (folder / name).write_text(json.dumps(changed))
    return folder


def write_problems(path: Path, model_dir: Path, num_problems: int, num_tokens: int) -> None:
    """Prompts of plain words, each of exactly `num_tokens` tokens."""
    tokenizer = Tokenizer(model_dir)
    rng = random.Random(0)
    prompts: list[str] = []
    while len(prompts) < num_problems:
        words = rng.choices(WORDS, k=num_tokens)
        while len(tokenizer.encode(" ".join(words))) > num_tokens:
            words.pop()
        if len(tokenizer.encode(" ".join(words))) == num_tokens:
            prompts.append(" ".join(words))
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def summary(without_kl: dict[str, Any], with_kl: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for suffix, sides in (("", without_kl), ("_with_kl", with_kl)):
        ours_s, trl_s = (statistics.median(sides[side]["step_s"]) for side in ("ours", "trl"))
        result |= {
            f"speedup{suffix}": round(trl_s / ours_s, 2),
            f"polyrhythm_s_per_step{suffix}": round(ours_s, 2),
            f"trl_s_per_step{suffix}": round(trl_s, 2),
        }
    return result | {
        "polyrhythm_tokens_per_completion": without_kl["ours"]["tokens_per_completion"],
        "trl_tokens_per_completion": without_kl["trl"]["tokens_per_completion"],
        "trl_batch_size": without_kl["trl"]["batch_size"],
        "trl_version": without_kl["trl"]["trl_version"],
        "threads": num_cores(),
    }


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def rounded(seconds: list[float]) -> list[float]:
    return [round(value, 2) for value in seconds]


def say(message: str) -> None:
    print(message, flush=True)


if __name__ == "__main__":
    main()
