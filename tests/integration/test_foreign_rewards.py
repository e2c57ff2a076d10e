"""TRL's and verl's own reward functions, unchanged, in our workers: what they give, and what it adds up to."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.config import RewardConfig
from polyrhythm.errors import UserError
from polyrhythm.rewards.checks import check_columns, import_in_worker
from polyrhythm.rewards.functions import worker_setup
from polyrhythm.rewards.kinds import make_reward
from polyrhythm.rewards.sandbox.frames import GroupScores, GroupToScore
from polyrhythm.rewards.sandbox.pool import RewardPool
from polyrhythm.types import Problem
from tests.foreign_packages import make_folder
from tests.integration.conftest import Cli
from tests.tiny_model import CHAT_TEMPLATE, save_tiny_model, save_tiny_reward_model

HERE = Path(__file__).parent
# math-verify keeps time with the alarm that would otherwise end a test that hangs.
pytestmark = pytest.mark.timeout(600, method="thread")

COMPLETIONS = [
    r"<think>6 times 7</think>The answer is \boxed{42}.",
    r"<think>\boxed{42}</think>The answer is \boxed{43}.",
    r"<think>never ends \boxed{42}",
    r"\boxed{\frac{1}{3}}",
    r"So $x = \frac{2}{6}$, and the final answer is $\frac{2}{6}$.",
    "42",
    "The answer is 0.5",
    r"<think>a</think><think>b</think>\boxed{0.5}",
    "",
    "\\boxed{",
    "again again again again again again again again",
    r"\boxed{x^2 + 2x + 1}",
]
UNPARSABLE = "nothing to parse"
SOLUTIONS = ["42", r"\frac{1}{3}", "0.5", "$(x+1)^2$", UNPARSABLE]
TRL_FUNCTIONS: dict[str, dict[str, Any] | None] = {
    "accuracy_reward": None,
    "reasoning_accuracy_reward": None,
    "think_format_reward": None,
    "get_cosine_scaled_reward": {"max_len": 50, "min_value_wrong": -0.9},
    "get_repetition_penalty_reward": {"ngram_size": 2, "max_penalty": -0.7},
    "get_soft_overlong_punishment": {"max_completion_len": 40, "soft_punish_cache": 15},
}
AROUND_TRL = ["accuracy_after_a_while", "format_of_hard_problems", "thirty_percent_for_an_even_answer"]


@pytest.fixture(scope="module")
def packages() -> Path:
    return make_folder()


@pytest.fixture
def on_the_path(packages, monkeypatch) -> Path:
    """The workers find TRL and the functions of this folder; this process does not."""
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{HERE}")
    return packages


def groups_of(solutions: list[str], completions: list[str]) -> list[GroupToScore]:
    return [
        GroupToScore(
            columns={"solution": solution, "answer": solution, "level": "hard" if place % 2 else "easy"},
            prompt=[{"role": "user", "content": f"Question {place}"}],
            completions=completions,
            completion_ids=[list(text.encode()) for text in completions],
            finish_reason=["stop"] * len(completions),
        )
        for place, solution in enumerate(solutions)
    ]


def score_in_workers(config: RewardConfig, groups: list[GroupToScore]) -> list[GroupScores]:
    async def score() -> list[GroupScores]:
        async with RewardPool(worker_setup(config, None), config.num_workers, config.deadline_s) as rewards:
            return await asyncio.gather(*map(rewards.score, groups))

    scores = asyncio.run(score())
    assert not any(group.failures or group.repeated for group in scores)
    return scores


@pytest.fixture(scope="module")
def all_functions(tmp_path_factory) -> RewardConfig:
    """All of trl.rewards, functions around them that are async or do not always apply, and a reward model."""
    model = {"path": str(save_tiny_reward_model(tmp_path_factory.mktemp("reward_model")))}
    specs = [f"trl.rewards:{name}" for name in TRL_FUNCTIONS] + [f"rewards_around_trl:{name}" for name in AROUND_TRL]
    return RewardConfig(
        functions=[*specs, "reward_model"],
        weights=[1.0, 0.5, 0.25, 2.0, -1.0, 0.1, 0.7, 3.0, 1.0, 0.01],
        options={name: options for name, options in TRL_FUNCTIONS.items() if options} | {"reward_model": model},
        num_workers=2,
    )


@pytest.fixture(scope="module")
def two_functions(all_functions) -> RewardConfig:
    """Neither of which applies to every problem."""
    functions = ["trl.rewards:accuracy_reward", "rewards_around_trl:format_of_hard_problems"]
    return RewardConfig(functions=functions, weights=[1.0, 0.5])


@pytest.fixture(scope="module")
def trls_trainer(packages, all_functions, two_functions) -> dict[str, Any]:
    """What GRPOTrainer makes of the table: each function's scores, and the totals of both configurations."""
    specs = all_functions.functions
    asked = {
        "functions": [{"spec": spec, "options": all_functions.options.get(name_of(spec))} for spec in specs],
        "weightings": [
            {specs.index(spec): weight for spec, weight in zip(config.functions, config.weights, strict=True)}
            for config in (all_functions, two_functions)
        ],
        "groups": [
            {"columns": g.columns, "prompt": g.prompt, "completions": g.completions, "completion_ids": g.completion_ids}
            for g in groups_of(SOLUTIONS, COMPLETIONS)
        ],
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "trl_trainer.py")],
        input=json.dumps(asked),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (packages, HERE)))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def name_of(spec: str) -> str:
    return spec.rpartition(":")[2]


def test_trls_own_functions_add_up_to_what_trls_own_trainer_makes_of_them(on_the_path, all_functions, trls_trainer):
    scores = score_in_workers(all_functions, groups_of(SOLUTIONS, COMPLETIONS))
    for spec, theirs in zip(all_functions.functions, trls_trainer["scores"], strict=True):
        ours = [value for group in scores for value in group.scores[name_of(spec)]]
        assert ours == pytest.approx(theirs, abs=1e-5), spec
        assert len(set(theirs)) > 1, f"{spec} gives the same to all: nothing was compared"
    assert [reward for group in scores for reward in group.rewards] == pytest.approx(
        trls_trainer["totals"][0], abs=1e-5
    )
    assert scores[0].extra["gold_parsed"] == ["[42, '42']"] * len(COMPLETIONS), "log_extra is as in TRL"


def test_where_no_function_applies_there_is_no_reward_as_in_trl(on_the_path, two_functions, trls_trainer):
    scores = score_in_workers(two_functions, groups_of(SOLUTIONS, COMPLETIONS))
    assert [reward for group in scores for reward in group.rewards] == trls_trainer["totals"][1]
    *_, unparsable = scores
    assert unparsable.rewards == [None] * len(COMPLETIONS)


def test_our_own_rewards_give_what_trls_of_the_same_meaning_give(on_the_path):
    pairs = {
        "accuracy_reward": "math",
        "get_repetition_penalty_reward": "repetition",
        "get_soft_overlong_punishment": "overlong",
    }
    config = RewardConfig(
        functions=[*(f"trl.rewards:{name}" for name in [*pairs, "reasoning_accuracy_reward"]), *pairs.values()],
        options={name: TRL_FUNCTIONS[name] for name in pairs if TRL_FUNCTIONS[name]}
        | {"math": {"latex_only": True}}
        | {"repetition": {"ngram_size": 2, "max_penalty": -0.7}, "overlong": {"max_tokens": 40, "cache": 15}},
    )
    groups = groups_of(SOLUTIONS, COMPLETIONS)
    after_thinking = make_reward("math", {"latex_only": True, "after": "</think>"})
    for group, scores in zip(groups, score_in_workers(config, groups), strict=True):
        for theirs, ours in pairs.items():
            assert scores.scores[ours] == pytest.approx(scores.scores[theirs]), (group.columns, ours)
        if group.columns["answer"] != UNPARSABLE:  # TRL's gives 0 instead of None there, if there is no </think>
            answers = [group.columns["answer"]] * len(COMPLETIONS)
            assert after_thinking(group.completions, answers) == scores.scores["reasoning_accuracy_reward"]


def test_a_column_that_trls_function_needs_is_missed_before_a_run_starts(on_the_path):
    setup = worker_setup(RewardConfig(functions=["trl.rewards:accuracy_reward"]), None)
    problem = Problem(index=0, prompt="2+2=", columns={"answer": "4"})
    with pytest.raises(UserError, match=r"'trl.rewards:accuracy_reward' needs the column 'solution'"):
        check_columns(import_in_worker(setup), problem)


def test_verls_own_scoring_runs_by_its_file(packages):
    """By the name of its module it would import all of verl, which needs Ray."""
    scoring = packages / "verl" / "utils" / "reward_score"
    config = RewardConfig(
        functions=[f"{scoring}/{name}.py:compute_score" for name in ("gsm8k", "math_dapo", "math_reward")],
        weights=[1.0, 0.5, 0.25],
    )
    group = GroupToScore(
        columns={
            "data_source": "openai/gsm8k",
            "reward_model": {"style": "rule", "ground_truth": "72"},
            "extra_info": {},
        },
        prompt=[{"role": "user", "content": "How many clips?"}],
        completions=["48 + 24 = 72\n#### 72", "#### 71", "Answer: 72", r"So \boxed{72}", ""],
        completion_ids=[[1]] * 5,
        finish_reason=["stop"] * 5,
    )
    (scores,) = score_in_workers(config, [group])
    assert scores.scores == {
        "gsm8k.compute_score": [1.0, 0.0, 0.0, 0.0, 0.0],
        "math_dapo.compute_score": [-1.0, -1.0, 1.0, 1.0, -1.0],
        "math_reward.compute_score": [0.0, 0.0, 0.0, 1.0, 0.0],
    }
    assert scores.rewards == [0.5, -0.5, 0.5, 0.75, -0.5]
    assert scores.extra["pred"][2] == "72", "what a dict says beside the score is kept"


def write_verls_parquet(path: Path) -> None:
    """The columns that verl's examples/data_preprocess/gsm8k.py writes."""
    import datasets

    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"split": "train", "index": 8 * a + b, "answer": f"#### {a + b}", "question": f"{a} + {b}"},
        }
        for a in range(4)
        for b in range(4)
    ]
    datasets.Dataset.from_list(rows).to_parquet(path)


def test_a_run_trains_on_verls_parquet_with_verls_scoring_and_trls_rewards(packages, tmp_path):
    model = save_tiny_model(tmp_path / "model", CHAT_TEMPLATE)
    write_verls_parquet(tmp_path / "train.parquet")
    outcome = Cli(tmp_path, model, packages).train(
        num_steps=2,
        task__options='{"path": "train.parquet"}',
        reward__functions=json.dumps(
            [
                f"{packages}/verl/utils/reward_score/gsm8k.py:compute_score",
                "trl.rewards:think_format_reward",
                "trl.rewards:get_soft_overlong_punishment",
            ]
        ),
        reward__weights="[1.0, 0.5, 0.5]",
        reward__options='{"get_soft_overlong_punishment": {"max_completion_len": 12, "soft_punish_cache": 11}}',
    )
    assert outcome.returncode == 0, outcome.output
    assert outcome.run_dir is not None
    samples = [json.loads(line) for line in (outcome.run_dir / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 8
    for sample in samples:
        scores = sample["scores"]
        assert scores.keys() == {"compute_score", "think_format_reward", "get_soft_overlong_punishment"}
        assert sample["reward"] == pytest.approx(
            scores["compute_score"] + 0.5 * scores["think_format_reward"] + 0.5 * scores["get_soft_overlong_punishment"]
        )
    assert any(sample["reward"] < 0 for sample in samples)
