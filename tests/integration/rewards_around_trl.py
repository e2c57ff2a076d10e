"""Functions as users of TRL write them: around TRL's own, async, and applying to some problems only."""

import asyncio

from trl.rewards import accuracy_reward, think_format_reward


async def accuracy_after_a_while(completions, solution, **kwargs):
    await asyncio.sleep(0.01)
    return accuracy_reward(completions, solution, **kwargs)


async def format_of_hard_problems(completions, level, **kwargs):
    await asyncio.sleep(0)
    return [
        score if hard == "hard" else None for score, hard in zip(think_format_reward(completions), level, strict=True)
    ]


def thirty_percent_for_an_even_answer(completions, **kwargs):
    return [0.3 if completion[0]["content"].strip(" .}")[-1:] in "02468" else 0.0 for completion in completions]
