"""`polyrhythm.train` and `polyrhythm.rollouts`, called as a script calls them: real processes, tiny model."""

import asyncio
import json
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

import polyrhythm
from polyrhythm.errors import RunError, UserError
from polyrhythm.training.policy.tri_model import load_policy
from polyrhythm.training.trainer import Trainer

NUM_STEPS = 2
ROWS = [{"prompt": f"{a} plus {b} is", "answer": a + b} for a in range(4) for b in range(4)]


@pytest.fixture
def given(work_dir, tiny_model_dir, monkeypatch):
    monkeypatch.chdir(work_dir)
    return {
        "model": tiny_model_dir,
        "dataset": ROWS,
        "rewards": "my_rewards:many_low_bytes",
        "num_steps": NUM_STEPS,
        "order": "problem",
        "rollout": polyrhythm.RolloutConfig(group_size=4, groups_per_step=6, max_tokens=12),
        "training": {"learning_rate": 1e-3, "tokens_per_micro_batch": 128, "share_prompt": "always"},
        "engine": {"max_batch": 16},
        "observe": {"view": "plain"},
    }


def children() -> list[str]:
    """Processes of runs that this process has started and that are still there."""
    return [" ".join(child.cmdline()) for child in psutil.Process().children() if "polyrhythm" in child.cmdline()]


def test_a_loop_of_ones_own_gets_the_rollouts_of_train_and_makes_the_same_weights_byte_for_byte(given, capsys):
    run = in_a_thread_beside_a_running_event_loop(lambda: polyrhythm.train(**given))
    assert [step["step"] for step in run.metrics] == [1, 2] and run.config.num_steps == NUM_STEPS
    assert {"prompt", "completion", "reward"} <= run.samples[0].keys()
    assert "2 steps, reward" in repr(run) and str(run.model_dir) in repr(run)
    rows = (run.folder / "dataset.jsonl").read_text().splitlines()
    assert [json.loads(row) for row in rows] == ROWS
    assert "step 2/2" in capsys.readouterr().out
    with polyrhythm.rollouts(**given) as loader:
        trainer = Trainer(loader.config, load_policy(given["model"]))
        loader.publish(trainer.policy)
        for step in loader.steps():
            trainer.begin_step(step.version)
            for update in step.updates():
                for micro_batch in update:
                    trainer.forward_backward(micro_batch)
                trainer.optim_step()
            loader.publish(trainer.policy, trainer.metrics())
    assert not children()
    trained, own = load_file(run.model_dir / "model.safetensors"), trainer.policy.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in trained.items())
    of_trainer, of_loop = run.metrics[-1], polyrhythm.Run(loader.folder).metrics[-1]
    assert of_trainer["train/loss"] == of_loop["train/loss"] and of_trainer["reward/mean"] == of_loop["reward/mean"]


def in_a_thread_beside_a_running_event_loop(call):
    """As in a notebook whose kernel runs an event loop."""

    async def main():
        return await asyncio.get_running_loop().run_in_executor(None, call)

    return asyncio.run(main())


def test_an_interrupted_run_ends_its_processes_says_how_to_go_on_and_does(given, capsys):
    ended = threading.Event()

    def interrupt_after_one_step():
        while not ended.is_set():
            if _has_step(1):
                os.kill(os.getpid(), signal.SIGINT)
                return
            ended.wait(0.02)

    watcher = threading.Thread(target=interrupt_after_one_step)
    watcher.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            polyrhythm.train(**given | {"num_steps": 500})
    finally:
        ended.set()
        watcher.join(60)
    assert not children()
    folder = _newest_run()
    assert f'polyrhythm.train(resume="{folder}")' in capsys.readouterr().err
    with pytest.raises(UserError, match="leave out dataset"):
        polyrhythm.train(resume=folder, dataset=ROWS)
    num_finished = len(polyrhythm.Run(folder).metrics)
    run = polyrhythm.train(resume=folder, num_steps=num_finished + 1)
    assert run.folder == folder and len(run.metrics) == num_finished + 1


def _newest_run():
    return max((Path.cwd() / "runs").glob("*"))


def _has_step(number: int) -> bool:
    return any(file.read_bytes().count(b"\n") >= number for file in (Path.cwd() / "runs").glob("*/metrics.jsonl"))


def test_an_engine_that_dies_for_good_raises_in_the_loop_and_nothing_is_left(given):
    with (
        pytest.raises(RunError, match="engine-0 was killed by SIGKILL"),
        polyrhythm.rollouts(**given, cluster={"max_restarts": 0}) as loader,
    ):
        loader.publish(load_policy(given["model"]))
        for step in loader.steps():
            for child in psutil.Process().children():
                if "engine-0" in child.cmdline():
                    child.kill()
            for update in step.updates():
                list(update)
    assert not children()


def test_a_mistake_in_the_rows_leaves_no_run_folder(given):
    with pytest.raises(UserError, match=r"dataset\.jsonl"):
        polyrhythm.train(**given | {"dataset": [*ROWS, {"text": "no prompt"}]})
    assert not list(Path("runs").glob("*"))
