"""A task of one's own, with its prompts, its reward and its stop string: `python examples/own_task.py [MODEL NUM_STEPS]`.

A task is a class with the five members of `polyrhythm.tasks.Task`. This one has no end of problems: it makes each one from
its index, which is all that a run needs to go on where it stopped. In a TOML file it would be `[task] name = "own_task:Squares"`.
"""

import sys

import polyrhythm
from polyrhythm.types import Problem


class Squares:
    """What is the square of a number?"""

    num_problems = None
    reward = "own_task:close_by"
    stop = ("\n",)
    correct_above = 0.99

    def __init__(self, largest: int = 20):
        self.largest = largest

    def problem(self, index: int) -> Problem:
        number = index % (self.largest + 1)
        prompt = f"The square of 3 is 9\nThe square of 4 is 16\nThe square of {number} is"
        return Problem(index=index, prompt=prompt, columns={"square": number * number})


def close_by(completions, square, **_):
    """1 for the right number, less for one that is further away, 0 for none at all."""
    scores = []
    for text, right in zip(completions, square, strict=True):
        word = text.split()[0] if text.split() else ""
        scores.append(1 / (1 + abs(int(word) - right)) if word.isdecimal() else 0.0)
    return scores


def main(model="smollm2-135m", num_steps=20):
    run = polyrhythm.train(model=model, dataset=Squares, task={"options": {"largest": 12}}, num_steps=int(num_steps))
    print(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
