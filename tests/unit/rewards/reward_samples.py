"""Reward functions, good and bad, that the tests run in real workers."""

import asyncio
import functools
import os
import re
import signal
import time
from pathlib import Path

import numpy


def exact(completions, answer):
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def everything(**offered):
    return [float(len(offered)) for _ in offered["completions"]]


def of_messages(prompts, completions):
    assert prompts[0][0]["role"] == "user"
    return [len(messages[0]["content"]) for messages in completions if messages[0]["role"] == "assistant"]


async def asynchronous(completion_ids):
    await asyncio.sleep(0)
    return [sum(ids) for ids in completion_ids]


def as_an_array(completions):
    return numpy.array([len(text) for text in completions])


def as_scalars(completions):
    return tuple(numpy.float32(len(text)) for text in completions)


def true_or_false(completions):
    return [text == "4" for text in completions]


def own_event_loop(completions):
    """A function that is not async may run a loop of its own, as TRL's code_reward does."""
    return [asyncio.run(_length_of(text)) for text in completions]


async def _length_of(text):
    return float(len(text))


def with_an_alarm(completions):
    """Works in a main thread only, as math-verify does."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(1)
    signal.alarm(0)
    return [1.0 for _ in completions]


def reasons(finish_reason):
    return [float(reason == "length") for reason in finish_reason]


def state(completions, trainer_state):
    return [trainer_state.global_step + trainer_state.max_steps * 10 + trainer_state.epoch * 1000 for _ in completions]


def prints(completions):
    print("this must not reach the frames", flush=True)
    os.write(1, b"nor this")
    return [1 for _ in completions]


meeting = asyncio.Event()


async def waits_for_the_other(completions):
    await asyncio.wait_for(meeting.wait(), 5)
    return [1.0 for _ in completions]


async def wakes_the_other(completions):
    meeting.set()
    return [2.0 for _ in completions]


loops = []


async def same_loop(completions):
    loops.append(asyncio.get_running_loop())
    return [float(loops[0] is loops[-1]) for _ in completions]


def only_short_ones(completions):
    return [1.0 if len(text) < 3 else None for text in completions]


def only_long_ones(completions):
    return [1.0 if len(text) > 3 else None for text in completions]


def logs(completions, log_extra, log_metric):
    log_extra("parsed", [text.upper() for text in completions])
    log_extra("odd", [object, float("inf"), numpy.float64(2.5)][: len(completions)])
    log_metric("length", len(completions[0]))
    log_metric("length", 7)
    log_metric("bad", float("nan"))
    return [0.0 for _ in completions]


def logs_for_too_few(completions, log_extra):
    log_extra("parsed", ["one"])
    return [0.0 for _ in completions]


def picky(completions):
    for text in completions:
        if text == "bad":
            raise ValueError("a bad one")
    return [float(len(text)) for text in completions]


def together(completions):
    if len(completions) > 1:
        raise ValueError("not together")
    return [1.0]


def best_of_all(completions):
    if "bad" in completions:
        raise ValueError("a bad one")
    return [float(text == max(completions, key=len)) for text in completions]


best_of_all.compares_completions = True


def hangs_for_a_bad_one(completions):
    if "bad" in completions:
        time.sleep(600)
    return [float(len(text)) for text in completions]


def dies_of_a_bad_one(completions):
    if "bad" in completions:
        os._exit(7)
    return [float(len(text)) for text in completions]


def how_many(completions):
    return [float(len(completions)) for _ in completions]


def how_many_at_once(completions):
    return [float(len(completions)) for _ in completions]


how_many_at_once.groups_per_call = 8


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert not kwargs
    if solution_str == "bad":
        raise ValueError("a bad one")
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}


def with_a_sentence_as_key(solution_str):
    return {"score": 1.0, "is it right?": True}


def gsm8k(solution_str, ground_truth, method="strict"):
    return 1.0 if solution_str == ground_truth and method == "strict" else 0.0


async def later(solution_str, ground_truth):
    return float(solution_str == ground_truth)


def no_score(solution_str):
    return {"acc": 1}


def with_bonus(bonus, scale=1.0):
    def score(completions):
        return [scale * len(text) + bonus for text in completions]

    return score


class Judge:
    def __call__(self, completions):
        return [4.0 for _ in completions]


judge = Judge()
halved = functools.partial(lambda factor, completions: [factor * len(text) for text in completions], 0.5)


def raises(completions):
    raise KeyError("no such answer")


def bare_assert(completions, answer=None):
    assert completions[0] == answer  # no message


def raises_deep_inside(completions):
    return [_parse(text) for text in completions]


def _parse(text):
    return int(text + "x")


def needs_two(completions, answer, *, unit, prompts=None, hint="", **others):
    return 1


def raises_half_a_character(completions):
    raise ValueError("\ud800")


def bare_number(completions):
    return len(completions[0])


def not_finite(completions):
    return [float("nan") for _ in completions]


def too_many(completions):
    return [1.0 for _ in range(len(completions) + 1)]


def text(completions):
    return ["1.0" for _ in completions]


def environment(variable):
    return [os.environ.get(name) is not None for name in variable]


def hangs_holding_the_lock(completions):
    return [re.match(r"(a+)+$", "a" * 60 + "b") is None]


def hangs_once(marker):
    if not Path(marker[0]).exists():
        Path(marker[0]).touch()
        time.sleep(600)
    return [1 for _ in marker]


def dies_once(marker):
    if not Path(marker[0]).exists():
        Path(marker[0]).touch()
        os._exit(7)
    return [1 for _ in marker]


def dies(completions):
    os._exit(7)


def takes_memory(completions):
    return [len(bytearray(2**30))]


def writes_a_large_file(path):
    with open(path[0], "wb") as file:
        file.truncate(2**31)
    return [1 for _ in path]


def process_id(completions):
    return [os.getpid() for _ in completions]
