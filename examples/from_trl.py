"""A script for TRL's GRPOTrainer, moved over line by line from from_trl.original.txt: `python examples/from_trl.py [MODEL NUM_STEPS]`."""

import sys

from datasets import Dataset

from polyrhythm import Config, RolloutConfig, TrainingConfig, train

MODEL, NUM_STEPS = sys.argv[1:] or ("HuggingFaceTB/SmolLM2-135M-Instruct", 20)
DATASET = Dataset.from_list([{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(10) for b in range(10)])


def correct(completions, answer, **kwargs):
    return [float(text.strip().startswith(expected)) for text, expected in zip(completions, answer, strict=True)]


def brief(completions, **kwargs):
    return [-len(text) / 100 for text in completions]


if __name__ == "__main__":
    config = Config(
        num_steps=int(NUM_STEPS),
        rollout=RolloutConfig(group_size=8, max_tokens=16),
        training=TrainingConfig(learning_rate=1e-5),
    )
    train(model=MODEL, rewards=[correct, brief], reward_weights=[1.0, 0.1], config=config, dataset=DATASET)
