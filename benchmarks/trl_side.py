"""TRL's side of against_trl.py, run by the Python of its own environment: `GRPOTrainer` on the given problems.

Prints one line of JSON last. Nothing of this project is imported but the reward beside this file.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--problems", type=Path, required=True, help="jsonl file with a prompt per line")
    parser.add_argument("--steps", type=int, required=True, help="steps, those to warm up included")
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--completion", type=int, required=True, help="tokens of a completion")
    parser.add_argument("--batch-size", type=int, required=True, help="completions of one forward and backward pass")
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--beta", type=float, required=True, help="KL coefficient; 0 has no reference model")
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    print(json.dumps(measure(options)))


def measure(options: argparse.Namespace) -> dict[str, object]:
    import hash_reward
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback

    torch.set_num_threads(options.threads)
    ends_s: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends_s.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as output_dir:
        trainer = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
            reward_funcs=hash_reward.score,
            args=trl.GRPOConfig(output_dir=output_dir, **settings(options)),
            train_dataset=Dataset.from_list([json.loads(line) for line in options.problems.read_text().splitlines()]),
            callbacks=[Clock()],
        )
        started_s = time.perf_counter()
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    return {
        "step_s": [end - begin for begin, end in zip([started_s, *ends_s], ends_s, strict=False)],
        "tokens_per_completion": sum(entry["completions/mean_length"] for entry in logged) / len(logged),
        "kl_last": logged[-1].get("kl", 0.0),
        "trl_version": trl.__version__,
        "threads": torch.get_num_threads(),
    }


def settings(options: argparse.Namespace) -> dict[str, object]:
    """One update on all completions of a step; what is not named here is TRL's default."""
    return {
        "max_steps": options.steps,
        "num_generations": options.group_size,
        "max_completion_length": options.completion,
        "per_device_train_batch_size": options.batch_size,
        "gradient_accumulation_steps": options.groups * options.group_size // options.batch_size,
        "learning_rate": options.learning_rate,
        "beta": options.beta,
        "use_cpu": True,
        "bf16": False,  # TRL's default, many times slower on most CPUs
        "gradient_checkpointing": False,  # TRL's default saves memory that is not short here, and costs time
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


if __name__ == "__main__":
    main()
