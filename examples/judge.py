"""A reward that asks a model behind an OpenAI-compatible server: `python examples/judge.py [MODEL NUM_STEPS]`.

Reward workers see nothing of the environment but what `reward.environment` names, here the judge's key. Where the judge is and
what it is called are read before the run begins: workers are copies of this process and have the values.
"""

import json
import os
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import polyrhythm

BASE_URL = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")
JUDGE = os.environ.get("JUDGE_MODEL", "gpt-4o-mini")
QUESTION = "Rate this answer from 0 to 9. Say the number alone.\n\nQuestion: {prompt}\n\nAnswer: {completion}"
ROWS = [
    {"prompt": f"Write one sentence about {thing}."} for thing in ("rain", "bread", "music", "the sea", "winter", "tea")
]
DEADLINE_S = 60


def judged(prompts, completions, **_):
    """All completions of a problem are asked about at once; None: the judge gave no number, so there is no reward."""
    with ThreadPoolExecutor(len(completions)) as threads:
        return list(threads.map(ask, prompts, completions))


def ask(prompt, completion):
    message = {"role": "user", "content": QUESTION.format(prompt=prompt, completion=completion)}
    body = {"model": JUDGE, "messages": [message], "max_tokens": 8}
    request = urllib.request.Request(
        f"{BASE_URL}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        answer = json.load(response)["choices"][0]["message"]["content"]
    number = re.search(r"\d", answer)
    return int(number[0]) / 9 if number else None


def main(model="smollm2-135m", num_steps=20):
    run = polyrhythm.train(
        model=model,
        dataset=ROWS,
        rewards=judged,
        num_steps=int(num_steps),
        reward={"environment": ["OPENAI_API_KEY"], "deadline_s": 2.0 * DEADLINE_S, "num_workers": 2},
        rollout={"group_size": 4, "groups_per_step": 4, "max_tokens": 32},
    )
    print(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
