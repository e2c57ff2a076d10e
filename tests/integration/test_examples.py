"""Every example, run as its first line says, in a short form: a tiny model and few steps.

The notebook's cells are executed in order by `exec` in a process of their own: that needs no Jupyter, and functions of cells
are functions of `__main__`, as in one. Its own kernel would add an event loop, which test_python.py has.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import polyrhythm
from polyrhythm.algorithms.cost import CostModel
from polyrhythm.config import Config
from polyrhythm.loader.micro_batches import ReadyGroups
from polyrhythm.training.trainer import Trainer
from tests.conftest import build_tiny_model, make_group
from tests.integration.conftest import ROOT, RUN_DEADLINE_S
from tests.integration.test_serving import TEMPLATE, serve

EXAMPLES = ROOT / "examples"
KEY = "a-key-of-the-judge-0123456789"
RUN_CELLS = """
import json, sys
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]))
"""


def run_example(work_dir: Path, *arguments: object, **variables: str) -> str:
    """What the example prints; it is started from another folder than its own."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=work_dir, env=os.environ | {"PYTHONPATH": f"{ROOT}"} | variables,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_of(work_dir: Path) -> polyrhythm.Run:
    (folder,) = (work_dir / "runs").glob("*")
    return polyrhythm.Run(folder)


def module_of(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_function_and_a_list_of_dicts_train_in_fifteen_lines(tmp_path, tiny_model_dir):
    lines = [line for line in (EXAMPLES / "own_reward.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 15
    assert "step 2/2" in run_example(tmp_path, EXAMPLES / "own_reward.py", tiny_model_dir, 2)
    assert run_of(tmp_path).samples[0]["columns"]["answer"].isdecimal()


def test_a_script_of_trl_differs_in_its_import_and_its_configuration(tmp_path, tiny_model_dir):
    ours = ast.parse((EXAMPLES / "from_trl.py").read_text()).body
    theirs = ast.parse((EXAMPLES / "from_trl.original.txt").read_text()).body
    other = [mine for mine, its in zip(ours, theirs, strict=True) if ast.dump(mine) != ast.dump(its)]
    docstring, imported, main = other
    assert isinstance(docstring, ast.Expr) and isinstance(imported, ast.ImportFrom) and isinstance(main, ast.If)
    run_example(tmp_path, EXAMPLES / "from_trl.py", tiny_model_dir, 1)
    run = run_of(tmp_path)
    assert run.config.reward.weights == [1.0, 0.1] and run.config.rollout.max_tokens == 16
    assert (run.folder / "dataset").is_dir()


def test_a_task_of_ones_own_brings_its_reward_and_is_found_beside_the_script(tmp_path, tiny_model_dir):
    run_example(tmp_path, EXAMPLES / "own_task.py", tiny_model_dir, 1)
    run = run_of(tmp_path)
    assert run.config.task.name == "own_task:Squares" and "reward/accuracy" in run.metrics[0]


def test_sums_of_reasoning_gym_have_two_rewards_and_a_curve(tmp_path, tiny_model_dir):
    said = run_example(tmp_path, EXAMPLES / "chain_sum.py", tiny_model_dir, 1, "curve.svg")
    assert "answer is right: 0." in said and "answer is a number: 0." in said
    assert (tmp_path / "curve.svg").read_text().count("<polyline") == 2
    assert set(run_of(tmp_path).samples[0]["scores"]) == {"score", "format"}


def test_the_hand_written_loop_learns(tmp_path, tiny_model_dir):
    said = run_example(tmp_path, EXAMPLES / "hand_written_loop.py", tiny_model_dir, 15, 3e-3)
    rewards = [float(reward) for reward in re.findall(r"reward (\d\.\d+)", said)]
    assert len(rewards) == 15 and sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert (run_of(tmp_path).model_dir / "model.safetensors").exists()


def test_the_gradient_of_the_hand_written_loss_is_the_trainers():
    loop, groups = module_of("hand_written_loop"), [make_group(position) for position in range(3)]
    ready = ReadyGroups(CostModel(share_prompt=True, has_kl=False), 10_000, "group_std")
    for group in groups:
        ready.add(group)
    (micro_batch,) = ready.take(0)
    by_hand, by_trainer = build_tiny_model("llama"), build_tiny_model("llama")
    for group, advantages in zip(micro_batch.groups, micro_batch.advantages, strict=True):
        loop.loss_of(by_hand, group, advantages).backward()
    trainer = Trainer(Config(), by_trainer)
    trainer.begin_step(0)
    trainer.forward_backward(micro_batch)
    assert trainer.divisor == sum(group.num_sampled for group in groups)
    for mine, its in zip(by_hand.parameters(), by_trainer.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-5)


def test_a_judge_behind_an_openai_server_is_asked_with_its_key(tmp_path, tiny_model_dir):
    judge = tmp_path / "judge-model"
    shutil.copytree(tiny_model_dir, judge)
    (judge / "chat_template.jinja").write_text(TEMPLATE)
    key_file = tmp_path / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(KEY)
    for served in serve("--model", judge, "--token-file", key_file):
        variables = {"OPENAI_BASE_URL": f"{served.url}/v1", "OPENAI_API_KEY": KEY, "JUDGE_MODEL": judge.name}
        run_example(tmp_path, EXAMPLES / "judge.py", tiny_model_dir, 1, **variables)
    rewards = [sample["reward"] for sample in run_of(tmp_path).samples]
    assert all(reward is None or 0 <= reward <= 1 for reward in rewards)
    log = (run_of(tmp_path).folder / "logs" / "conductor.log").read_text()
    assert "401" not in log and "Traceback" not in log


def test_the_notebook_runs_from_top_to_bottom(tmp_path, tiny_model_dir):
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert all(not cell.get("outputs") for cell in notebook["cells"])
    arguments = ("-c", RUN_CELLS, EXAMPLES / "notebook.ipynb")
    said = run_example(tmp_path, *arguments, MODEL=str(tiny_model_dir), NUM_STEPS="2")
    assert "step 2/2" in said and said.splitlines()[-1].startswith("3 + 4 =")
