"""What each built-in reward is worth."""

import asyncio
import json
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from polyrhythm.errors import UserError
from polyrhythm.rewards.kinds import make_reward
from polyrhythm.rewards.kinds.code import share_of
from tests.tiny_model import save_tiny_model, save_tiny_reward_model

# math-verify keeps time with the alarm that would otherwise end a test that hangs.
pytestmark = pytest.mark.timeout(300, method="thread")


@pytest.mark.parametrize(
    ("options", "completion", "answer", "reward"),
    [
        ({}, " 42\n", "42", 1.0),
        ({}, "42", 42, 1.0),
        ({}, "42", 42.0, 1.0),
        ({}, "42.0", 42.0, 1.0),
        ({}, "42", 42.5, 0.0),
        ({}, "It is 42", "42", 0.0),
        ({}, "42\nbecause", "42", 0.0),
        ({}, "blue", ["azure", "blue"], 1.0),
        ({}, "Blue", "blue", 0.0),
        ({}, "42", None, None),
        ({"ignore_case": True}, "Blue", "BLUE", 1.0),
        ({"part": "first_line"}, "42\nbecause", "42", 1.0),
        ({"part": "last_line"}, "because\n42\n", "42", 1.0),
        ({"pattern": r"<answer>(.*?)</answer>"}, "<answer>41</answer> no: <answer> 42 </answer>.", "42", 1.0),
        ({"pattern": r"\d+"}, "first 41, then 42 apples", "42", 1.0),
        ({"pattern": r"\d+"}, "none", "42", 0.0),
    ],
)
def test_exact_match(options, completion, answer, reward):
    assert make_reward("exact_match", options)(completions=[completion], answer=[answer]) == [reward]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a\nb</think><answer>4</answer>", 1.0),
        ("\n<think></think>\n\n<answer>4\n</answer>\n", 1.0),
        ("<think>a</think><answer>4</answer> and more", 0.0),
        ("<think>a</think>", 0.0),
        ("<think><think>a</think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
        ("<answer>4</answer><think>a</think>", 0.0),
        ("", 0.0),
    ],
)
def test_the_default_format_is_one_thought_and_one_answer(completion, reward):
    assert make_reward("format", {})(completions=[completion]) == [reward]


def test_a_format_of_ones_own_must_match_from_beginning_to_end():
    assert make_reward("format", {"pattern": r"Answer: .+"})(completions=["Answer: a\nb ", "An Answer: a"]) == [
        1.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("it is 42", "42", 1.0),
        ("it is 42, not 43", "42", 0.0),
        (r"it is \boxed{42}, not 43", "42", 1.0),
        ("<think>43</think><answer>42</answer>", "42", 1.0),
        ("<answer>42</answer><think>43</think>", "42", 1.0),
        ("#### 1234", "5 * 5 = 25\n#### 1,234", 1.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        (r"so $\frac{1}{2}$", 0.5, 1.0),
        (r"<answer>2\sqrt{3}</answer>", r"$\sqrt{12}$", 1.0),
        (r"\boxed{2\sqrt{3}}", r"2\sqrt{3}", 1.0),
        (r"\boxed{2}", r"2\sqrt{3}", 0.0),  # read as an expression among words, the reference would be 2
        (r"<answer>2\sqrt{3}</answer>", "2", 0.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{(1,2)}", "(1,2)", 1.0),
        ("3.5 apples", "3.5 apples", 1.0),
        ("", "42", 0.0),
        ("no idea", "42", 0.0),
        ("42", "", None),
        ("42", "no number here", None),
        ("42", None, None),
    ],
)
def test_math(completion, answer, reward):
    assert make_reward("math", {})(completions=[completion], answer=[answer]) == [reward]


def test_math_can_ask_for_latex_and_for_what_comes_after_a_thought():
    strict = make_reward("math", {"latex_only": True})
    assert strict(completions=["42", r"\boxed{42}"], answer=["42", "42"]) == [0.0, 1.0]
    after = make_reward("math", {"after": "</think>"})
    assert after(completions=["42", "<think>42</think> 43", "43 </think> 42"], answer=["42"] * 3) == [0.0, 0.0, 1.0]


def test_math_outside_of_the_main_thread_goes_without_its_alarm():
    values = []
    math = make_reward("math", {})
    thread = threading.Thread(target=lambda: values.extend(math(completions=["42"], answer=["42"])))
    thread.start()
    thread.join(timeout=60)
    assert values == [1.0]


def test_math_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"pip install 'polyrhythm\[math\]'"):
        make_reward("math", {})


def tokens(*lengths: int) -> list[list[int]]:
    return [list(range(length)) for length in lengths]


def test_length_is_worth_most_at_the_target():
    near = make_reward("length", {"target": 10, "budget": 4})
    assert near(completion_ids=tokens(0, 6, 8, 10, 11, 14, 99)) == [0.0, 0.0, 0.5, 1.0, 0.75, 0.0, 0.0]
    short = make_reward("length", {"budget": 4, "shape": "cosine"})
    assert short(completion_ids=tokens(0, 2, 4, 9)) == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_overlong_falls_to_its_worst_within_the_cache():
    overlong = make_reward("overlong", {"max_tokens": 100, "cache": 20})
    assert overlong(completion_ids=tokens(0, 80, 90, 100, 101)) == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_repetition_is_the_share_of_ngrams_that_came_before():
    repetition = make_reward("repetition", {"ngram_size": 2, "max_penalty": -2.0})
    assert repetition(completion_ids=[[1, 2, 3, 4], [5, 5, 5, 5, 5], [1], []]) == [0.0, -1.5, 0.0, 0.0]


async def run_elsewhere(code: str, tests: list[str]) -> list[bool]:
    await asyncio.sleep(0)
    return [test in code for test in tests]


async def test_code_is_run_by_the_users_sandbox_and_nowhere_else():
    code = make_reward("code", {"sandbox": f"{__name__}:run_elsewhere"})
    completions = [
        "Here:\n```python\nfirst\n```\nor\n```\nsecond\n```\n",
        "second",
        "",
        "```python\nraise SystemExit\n```",
    ]
    assert await code(completions=completions, tests=[["second", "first"]] * 4) == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("result", "share"),
    [(True, 1.0), (0.25, 0.25), ([True, False], 0.5), ([], 0.0), ({"passed": 3, "total": 4}, 0.75), (None, None)],
)
def test_a_sandbox_may_say_it_in_several_ways(result, share):
    assert share_of(result) == share


def test_a_sandbox_that_returns_no_share_is_told():
    with pytest.raises(ValueError, match="returned 3, which is no share from 0 to 1"):
        share_of(3)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory) -> Path:
    return save_tiny_reward_model(tmp_path_factory.mktemp("reward_model"))


def test_a_reward_model_scores_what_transformers_would(reward_model):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    ends = ["4", "four, of course", ""]
    with torch.inference_mode():
        of_text = [float(model(**tokenizer("2+2=" + end, return_tensors="pt")).logits) for end in ends]
        of_chat = [
            float(model(**tokenizer(f"user: 2+2=\nassistant: {end}\n", return_tensors="pt")).logits) for end in ends
        ]
    reward = make_reward("reward_model", {"path": str(reward_model), "batch": 2})
    assert reward(prompts=["2+2="] * 3, completions=ends) == pytest.approx(of_text, abs=1e-5)
    chat = [[{"role": "user", "content": "2+2="}]] * 3
    answers = [[{"role": "assistant", "content": end}] for end in ends]
    assert reward(prompts=chat, completions=answers) == pytest.approx(of_chat, abs=1e-5)
    assert len(set(of_text + of_chat)) == 6


def test_a_causal_model_is_no_reward_model(tmp_path):
    with pytest.raises(
        UserError, match="holds LlamaForCausalLM: a reward model is of the kind …ForSequenceClassification"
    ):
        make_reward("reward_model", {"path": str(save_tiny_model(tmp_path))})


def test_a_reward_model_with_several_labels_is_refused(reward_model, tmp_path):
    from transformers import LlamaForSequenceClassification

    LlamaForSequenceClassification.from_pretrained(
        reward_model, num_labels=3, ignore_mismatched_sizes=True
    ).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((reward_model / name).read_bytes())
    with pytest.raises(UserError, match="has 3 labels: a reward model gives one number"):
        make_reward("reward_model", {"path": str(tmp_path)})


def test_a_reward_model_that_does_not_fit_says_how_much_memory_it_needs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2000 * 2**20)
    limited = (
        "import resource; from polyrhythm.rewards.kinds import make_reward\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (4096 * 2**20, {resource.RLIM_INFINITY}))\n"
        f"make_reward('reward_model', {{'path': {str(tmp_path)!r}}})"
    )
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, timeout=60)
    assert "reward.memory_mb=4096 is too little" in done.stderr
    assert "2000 MB of weights: give at least 5500, or 0 for no limit" in done.stderr
