"""A model, a list of dicts and a function: `python examples/own_reward.py [MODEL NUM_STEPS]`."""

import sys

import polyrhythm

model, num_steps = sys.argv[1:] or ("smollm2-135m", 20)
rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(10) for b in range(10)]


def correct(completions, answer, **_):
    return [float(text.strip().startswith(expected)) for text, expected in zip(completions, answer, strict=True)]


print(polyrhythm.train(model=model, dataset=rows, rewards=correct, num_steps=int(num_steps)))
