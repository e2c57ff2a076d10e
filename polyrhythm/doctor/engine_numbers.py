"""What an engine that runs computes: of which distribution its log-probabilities are, and whether they are those of a model.

Asked like any client asks: an engine of ours by its own protocol, anything else by the OpenAI API.
"""

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from polyrhythm import messages
from polyrhythm.doctor.findings import Finding
from polyrhythm.http.client import BlockingClient
from polyrhythm.http.credentials import bearer
from polyrhythm.http.errors import CallFailed
from polyrhythm.types import Sampling

ABOUT = "engine"
DEADLINE_S = 60.0
PROMPT = [40] * 12
"""Repeated, because what follows is then likely in most models: likely tokens are drawn at every temperature."""
NUM_DRAWS, TEMPERATURE = 32, 0.7
NUM_PROVEN = 6
MIN_GAP, MAX_ERROR = 0.05, 0.1
PROCESSED_FIX = "start vLLM with --logprobs-mode processed_logprobs; a run that starts its engines does"


class Drawn(NamedTuple):
    """A completion: its tokens and the log-probability that the engine gives each."""

    token_ids: list[int]
    logprobs: list[float]


Ask = Callable[[float, int, int], list[Drawn]]
"""Completions of the prompt: at which temperature, how many, of how many tokens each. Raises `CallFailed` or `OSError`."""


def check_status(url: str, credential: str) -> Iterator[Finding]:
    """What an engine of a run says of its version: it serves one only after it has proven it."""
    version = version_of(url, credential)
    if version is None:
        return
    if version >= 0:
        yield Finding(
            ABOUT, "ok", f"it holds v{version}; of a run it serves only what it has loaded, verified and proven"
        )
    else:
        yield Finding(
            ABOUT, "problem", "it holds no version that it has loaded and proven, and serves nothing",
            "`polyrhythm engines list` says why its last load was refused",
        )  # fmt: skip


def check_logprob_mode(ask: Ask) -> Iterator[Finding]:
    """Asks for the same tokens at two temperatures: processed log-probabilities follow the temperature, raw ones do not."""
    plain, tempered = (_first_tokens(ask(temperature, NUM_DRAWS, 1)) for temperature in (1.0, TEMPERATURE))
    common = sorted(plain.keys() & tempered.keys(), key=plain.__getitem__)
    gap = plain[common[-1]] - plain[common[0]] if common else 0.0
    if gap < MIN_GAP:
        text = "of which distribution its log-probabilities are cannot be told: it drew too few tokens twice"
        yield Finding(ABOUT, "warning", text, "ask again")
        return
    ratio = (tempered[common[-1]] - tempered[common[0]]) / gap
    numbers = {"ratio": ratio, "processed": 1 / TEMPERATURE, "raw": 1.0}
    if abs(ratio * TEMPERATURE - 1) < MAX_ERROR:
        text = "log-probabilities are processed: of what was drawn from, after the temperature"
        yield Finding(ABOUT, "ok", text, numbers=numbers)
    elif abs(ratio - 1) < MAX_ERROR:
        text = "log-probabilities are raw: of temperature 1 whatever was asked for, so a run at another one would train on wrong ones"
        yield Finding(ABOUT, "problem", text, PROCESSED_FIX, numbers)
    else:
        text = f"log-probabilities at temperature {TEMPERATURE:g} are {ratio:.2f} times as far apart as at 1: neither raw nor processed"
        yield Finding(ABOUT, "problem", text, PROCESSED_FIX, numbers)


def check_weights(ask: Ask, model_dir: Path) -> Iterator[Finding]:
    """Whether what it computes is what the model in this folder computes, token by token."""
    from polyrhythm.training.policy.tri_model import load_policy
    from polyrhythm.weights.proof import TOLERANCES, own_logprobs

    (drawn,) = ask(1.0, 1, NUM_PROVEN)
    expected = own_logprobs(load_policy(model_dir), [[*PROMPT, *drawn.token_ids]])[-len(drawn.token_ids) :]
    gap = max(abs(theirs - ours) for theirs, ours in zip(drawn.logprobs, expected, strict=True))
    text, numbers = f"{gap:.2g} apart at most over {len(expected)} tokens", {"gap": gap}
    if gap <= TOLERANCES["float32"]:
        yield Finding(ABOUT, "ok", f"it computes what {model_dir.name} computes: {text}", numbers=numbers)
    elif gap <= TOLERANCES["bfloat16"]:
        text = f"it computes what {model_dir.name} computes in a coarser number format: {text}"
        yield Finding(ABOUT, "warning", text, "use --dtype float32 if the run trains in it", numbers)
    else:
        text = f"it does not compute what {model_dir.name} computes: {text}"
        yield Finding(ABOUT, "problem", text, "load the model again, or name the one that it serves", numbers)


def version_of(url: str, credential: str) -> int | None:
    """The policy version of an engine of ours; None if it is none, or does not answer us."""
    with BlockingClient(url, credential, peer=f"the engine at {url}") as client:
        try:
            return messages.decode(
                client.call("GET", "/status", deadline_s=DEADLINE_S), messages.EngineStatus
            ).policy_version
        except (CallFailed, msgspec.MsgspecError):
            return None


def asking_ours(url: str, credential: str, version: int) -> Ask:
    def ask(temperature: float, num: int, max_tokens: int) -> list[Drawn]:
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
        request = messages.GenerateRequest("doctor", version, PROMPT, list(range(1, num + 1)), sampling)
        with BlockingClient(url, credential, peer=f"the engine at {url}") as client:
            answer = client.call("POST", "/generate", request, deadline_s=DEADLINE_S)
        completions = messages.decode(answer, messages.GenerateReply).completions
        return [Drawn(completion.token_ids, completion.rollout_logprobs) for completion in completions]

    return ask


def asking_openai(url: str, credential: str, model: str) -> Ask:
    def ask(temperature: float, num: int, max_tokens: int) -> list[Drawn]:
        body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": temperature, "n": num, "seed": 1,
                "logprobs": 0, "return_token_ids": True, "ignore_eos": True}  # fmt: skip
        choices = post_json(f"{url}/v1/completions", credential, body)["choices"]
        return [Drawn(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]

    return ask


def post_json(url: str, credential: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": bearer(credential)} if credential else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return json.load(answer)


def _first_tokens(drawn: list[Drawn]) -> dict[int, float]:
    return {one.token_ids[0]: one.logprobs[0] for one in drawn}
