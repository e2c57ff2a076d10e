import json

import pytest

from polyrhythm.engine.openai.requests import BadParameter, ChatRequest, CompletionRequest, read_request
from polyrhythm.engine.refusals import Refused

USER = {"role": "user", "content": "hi"}


def completion(**parameters) -> CompletionRequest:
    return read_request(json.dumps({"prompt": "a"} | parameters).encode(), CompletionRequest)


def chat(**parameters) -> ChatRequest:
    return read_request(json.dumps({"messages": [USER]} | parameters).encode(), ChatRequest)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_a_prompt_is_text_or_ids_one_or_several(prompt, prompts):
    assert completion(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize("prompt", [[], ["a", 1], [[1], "a"], [1, [2]]])
def test_a_mixed_or_empty_prompt_is_refused(prompt):
    with pytest.raises(BadParameter, match=r"^prompt: a text, a list of texts"):
        completion(prompt=prompt).prompts()


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"echo": True}, "echo"),
        ({"logprobs": 3}, "logprobs"),
        ({"best_of": 4}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"min_p": 0.1}, "min_p"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"includes": 1}}, "stream_options"),
    ],
)
def test_a_bad_or_unsupported_parameter_is_refused_by_name(parameters, param):
    with pytest.raises(BadParameter, match=f"^{param}: ") as refusal:
        completion(**parameters)
    assert refusal.value.param == param and "$" not in str(refusal.value)


@pytest.mark.parametrize(
    "parameters",
    [
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    ],
)
def test_messages_that_are_not_text_are_refused(parameters):
    with pytest.raises(BadParameter, match=r"^messages: "):
        chat(**parameters).chat_messages()


@pytest.mark.parametrize("param", ["tools", "top_logprobs", "response_format", "reasoning_effort", "prompt"])
def test_what_chat_cannot_do_is_refused_by_name(param):
    with pytest.raises(BadParameter, match=f"^{param}: "):
        chat(**{param: 1})


def test_harmless_and_neutral_parameters_are_accepted():
    neutral = {"echo": False, "best_of": 1, "presence_penalty": 0, "logit_bias": {}, "suffix": None, "logprobs": None}
    assert completion(user="me", store=True, **neutral) == completion()
    assert chat(tools=[], tool_choice="none", response_format={"type": "text"}, metadata={"a": "b"}) == chat()


def test_parts_of_text_are_joined_and_developers_speak_as_the_system():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = chat(messages=[{"role": "developer", "content": parts}, USER]).chat_messages()
    assert messages == [{"role": "system", "content": "one two"}, USER]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b"\xff", b'{"prompt": NaN}'])
def test_a_body_that_is_no_json_object_is_refused(body):
    with pytest.raises(Refused, match=r"^the body"):
        read_request(body, CompletionRequest)


def test_a_seed_gives_different_completions_that_repeat_themselves_and_none_gives_random_ones():
    seeds = completion(seed=7, n=4).seeds()
    assert seeds == completion(seed=7, n=4).seeds() and len(set(seeds)) == 4
    assert seeds[:2] == completion(seed=7, n=2).seeds()
    assert seeds[0] != completion(seed=8).seeds()[0]
    random = completion(n=4).seeds()
    assert len(set(random)) == 4 and random != completion(n=4).seeds()


def test_temperatures_next_to_zero_are_greedy_and_an_empty_nucleus_keeps_the_best_token():
    assert completion(temperature=1e-30).sampling(1, ()).temperature == 0
    assert 0 < completion(top_p=0).sampling(1, ()).top_p < 1e-3
    assert completion(top_k=-1).sampling(1, ()).top_k == 0
