"""A model folder served by a real process and called with the real `openai` package."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from tests.integration.conftest import ROOT

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
TOKEN = "a-token-of-the-tests-0123456789"
START_DEADLINE_S = 300


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str

    def client(self, token: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=token, timeout=60, max_retries=0)


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "polyrhythm", "engine", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}"}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def serve(*arguments: object) -> Iterator[Served]:
    process = start(*arguments, "--threads", 1)
    try:
        assert process.stdout is not None
        announced = re.search(r"http://127.0.0.1:\d+", process.stdout.readline())
        assert announced, process.communicate(timeout=START_DEADLINE_S)
        yield Served(process, announced[0])
    finally:
        process.kill()
        process.communicate(timeout=60)


def refusal(*arguments: object) -> str:
    """The message of an engine that must not start."""
    process = start(*arguments)
    _, complaint = process.communicate(timeout=START_DEADLINE_S)
    assert process.returncode == 2, complaint
    return complaint


@pytest.fixture(scope="module")
def chat_model_dir(tiny_model_dir: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "tiny-chat"
    shutil.copytree(tiny_model_dir, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def served(chat_model_dir: Path) -> Iterator[Served]:
    yield from serve("--model", chat_model_dir)


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def test_the_model_is_listed_by_the_name_of_its_folder(client):
    assert [model.id for model in client.models.list()] == ["tiny-chat"]
    assert client.models.retrieve("tiny-chat").owned_by == "polyrhythm"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_the_same_seed_gives_the_same_text_and_none_gives_different_ones(client):
    asked = dict(model="tiny-chat", prompt="one plus one", max_tokens=20)
    first, second = (client.completions.create(**asked, seed=5, n=3) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    unseeded = [choice.text for _ in range(2) for choice in client.completions.create(**asked, n=3).choices]
    assert len(set(texts + unseeded)) == 9
    assert first.usage.prompt_tokens == 12 and first.usage.completion_tokens <= 60
    assert first.system_fingerprint == "policy-0"


def test_temperature_zero_is_greedy_whatever_the_seed(client):
    asked = dict(model="tiny-chat", prompt="ab", max_tokens=16, temperature=0)
    assert (
        client.completions.create(**asked, seed=1).choices[0].text == client.completions.create(**asked).choices[0].text
    )
    top_1 = client.completions.create(model="tiny-chat", prompt="ab", max_tokens=16, extra_body={"top_k": 1})
    assert top_1.choices[0].text == client.completions.create(**asked).choices[0].text


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("ab", 1), (["ab", "cd"], 2), ([66, 67], 1), ([[66, 67], [68, 69, 70]], 2)],
)
def test_prompts_are_texts_or_token_ids(client, prompt, num_prompts):
    reply = client.completions.create(model="tiny-chat", prompt=prompt, max_tokens=4, n=2)
    assert [choice.index for choice in reply.choices] == list(range(2 * num_prompts))


def test_a_streamed_completion_equals_the_whole_one(client):
    asked = dict(model="tiny-chat", prompt=["ab", "cd"], n=2, seed=9, max_tokens=40)
    whole = client.completions.create(**asked)
    texts, reasons, usage = ["", "", "", ""], {}, None
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage


def test_a_stop_string_ends_the_text_and_is_not_in_it(client):
    asked = dict(model="tiny-chat", prompt="ab", seed=2, max_tokens=60, logprobs=0)
    free = client.completions.create(**asked).choices[0].text
    stop = next(free[i : i + 2] for i in range(5, len(free)) if free[i : i + 2].isascii() and len(free[i : i + 2]) == 2)
    stopped = client.completions.create(**asked, stop=stop).choices[0]
    assert stopped.finish_reason == "stop" and stopped.text == free[: free.index(stop)]
    assert len(stopped.logprobs.tokens) == len(stopped.logprobs.token_logprobs) == len(stopped.logprobs.text_offset)
    assert (
        max(stopped.logprobs.text_offset, default=0) < len(stopped.text) and max(stopped.logprobs.token_logprobs) <= 0
    )
    streamed = client.completions.create(**(asked | {"stop": [stop, "never in it"]}), stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == stopped.text


def test_chat_goes_through_the_template(client):
    reply = client.chat.completions.create(
        model="tiny-chat",
        messages=[{"role": "user", "content": "hi"}],
        n=2,
        seed=1,
        max_completion_tokens=12,
        logprobs=True,
    )
    assert reply.usage.prompt_tokens == len("<user>hi\n<assistant>")
    assert {choice.message.role for choice in reply.choices} == {"assistant"}
    assert all(entry.logprob <= 0 and not entry.top_logprobs for entry in reply.choices[0].logprobs.content)
    plain = client.completions.create(model="tiny-chat", prompt="<user>hi\n<assistant>", n=2, seed=1, max_tokens=12)
    assert [choice.message.content for choice in reply.choices] == [choice.text for choice in plain.choices]


def test_a_streamed_chat_equals_the_whole_one(client):
    asked = dict(model="tiny-chat", messages=[{"role": "user", "content": "hi"}], seed=1, max_tokens=30)
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_errors_are_those_of_the_openai_package(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="gpt-4", prompt="a")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    for parameters in (
        {"echo": True},
        {"logprobs": 5},
        {"max_tokens": 10_000},
        {"presence_penalty": 1},
        {"stop": [""]},
    ):
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model="tiny-chat", prompt="a", **parameters)
        assert error.value.param == next(iter(parameters)) and error.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny-chat", messages=[{"role": "user", "content": "a"}], top_logprobs=2)
    assert error.value.param == "top_logprobs"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny-chat", prompt="a", temperature=3, stream=True)


def test_a_token_file_is_asked_for_from_everybody(chat_model_dir: Path, tmp_path: Path):
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    token_file.chmod(0o600)
    for served in serve("--model", chat_model_dir, "--token-file", token_file):
        with pytest.raises(openai.AuthenticationError):
            served.client("wrong").models.list()
        with pytest.raises(openai.AuthenticationError):
            served.client("wrong").completions.create(model="tiny-chat", prompt="a")
        assert served.client(TOKEN).completions.create(model="tiny-chat", prompt="a", max_tokens=2).choices
        command = served.process.args
        assert TOKEN not in " ".join(map(str, command if isinstance(command, list) else [command]))


def test_an_open_address_without_a_token_and_a_taken_port_are_refused_in_one_line(chat_model_dir: Path):
    complaint = refusal("--model", chat_model_dir, "--host", "0.0.0.0")
    assert "--host 0.0.0.0" in complaint and "--token-file" in complaint and complaint.count("\n") == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1 port {port}: " in refusal("--model", chat_model_dir, "--port", port)


def test_an_interrupt_ends_the_server_cleanly_even_within_a_stream(chat_model_dir: Path):
    for served in serve("--model", chat_model_dir):
        stream = served.client().completions.create(model="tiny-chat", prompt="a", max_tokens=200, stream=True)
        next(iter(stream))
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(timeout=60) == 0
        assert served.process.stderr is not None and "Traceback" not in served.process.stderr.read()
