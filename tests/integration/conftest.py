"""Real processes on a tiny model: a folder with a two-layer Llama and a byte tokenizer, and the command line to train it."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from polyrhythm import messages
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.observe.metrics import is_known
from tests.tiny_model import save_tiny_model

ROOT = Path(__file__).parents[2]
RUN_DEADLINE_S = 600


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def work_dir(tmp_path) -> Path:
    return fill_work_dir(tmp_path)


def fill_work_dir(folder: Path) -> Path:
    """A user's folder: problems in a file and reward functions in a module."""
    problems = [{"prompt": f"{a} plus {b} is", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    (folder / "my_rewards.py").write_text(REWARDS)
    return folder


REWARDS = '''
import os, sys, time

def many_low_bytes(completions, **columns):
    """A reward with variance for a random model: the share of characters below "a"."""
    return [sum(c < "a" for c in text) / max(1, len(text)) for text in completions]

async def tells(completions, finish_reason, trainer_state, log_extra, log_metric):
    """Applies to some completions only."""
    log_extra("first_letter", [text[:1] for text in completions])
    log_metric("step", trainer_state.global_step)
    return [float(len(text)) if reason == "length" else None for text, reason in zip(completions, finish_reason)]

def raises_at_times(completions, **columns):
    if any(len(text) % 3 == 0 for text in completions):
        raise ValueError("odd completion")
    return many_low_bytes(completions)

def hangs_at_times(completions, **columns):
    if any(sum(map(ord, text)) % 16 == 0 for text in completions):
        time.sleep(60)
    return many_low_bytes(completions)

def always_raises(completions, **columns):
    raise ValueError("no reward today")
'''


@dataclass
class Outcome:
    returncode: int
    output: str
    run_dir: Path | None

    def metrics(self) -> list[dict]:
        assert self.run_dir is not None
        rows = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        unknown = {
            name
            for row in rows
            for name in row
            if name not in ("step", "policy_version", "time") and not is_known(name)
        }
        assert not unknown, f"observe/metrics.py lacks {unknown}"
        return rows

    def weights(self) -> bytes:
        assert self.run_dir is not None
        return (self.run_dir / "model" / "model.safetensors").read_bytes()


class Cli:
    """The command line in the user's folder."""

    def __init__(self, work_dir: Path, model_dir: Path, packages: Path | None = None):
        self.work_dir = work_dir
        self.model_dir = model_dir
        self.packages = packages
        """A folder that the user has on PYTHONPATH."""

    def arguments(self, **flags) -> list[str]:
        defaults = {
            "model": self.model_dir, "num_steps": 3, "task.name": "dataset",
            "task.options": '{"path": "problems.jsonl"}', "reward.functions": '["my_rewards:many_low_bytes"]',
            "rollout.group_size": 4, "rollout.groups_per_step": 6, "rollout.max_tokens": 12,
            "training.learning_rate": 1e-3, "engine.max_batch": 16, "observe.view": "plain",
            "training.tokens_per_micro_batch": 128,
        }  # fmt: skip
        merged = defaults | {key.replace("__", "."): value for key, value in flags.items()}
        return ["train", *(part for key, value in merged.items() for part in (f"--{key}", str(value)))]

    def start(
        self, arguments: list[str], within: Callable[..., list[str]] = lambda *words: list(words)
    ) -> subprocess.Popen[str]:
        """`within` puts the command line into another one."""
        path = os.pathsep.join(str(folder) for folder in (ROOT, self.packages) if folder)
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.Popen(
            within(sys.executable, "-m", "polyrhythm", *arguments), cwd=self.work_dir, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def run(self, *arguments: str) -> Outcome:
        return self.finish(self.start(list(arguments)))

    def train(self, **flags) -> Outcome:
        return self.run(*self.arguments(**flags))

    def finish(self, process: subprocess.Popen[str]) -> Outcome:
        try:
            output, _ = process.communicate(timeout=RUN_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate(timeout=60)
            raise AssertionError(f"the run did not end within {RUN_DEADLINE_S} s:\n{output}") from None
        return Outcome(process.returncode, output, self.newest_run())

    def newest_run(self) -> Path | None:
        runs = sorted((self.work_dir / "runs").glob("*"))
        return runs[-1] if runs else None

    def wait_for(self, condition, what: str, deadline_s: float = 300.0):
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            if value := condition():
                return value
            time.sleep(0.05)
        raise AssertionError(f"{what} did not happen within {deadline_s} s")

    def wait_for_steps(self, num_steps: int) -> Path:
        """Until so many steps are in metrics.jsonl."""

        def enough() -> Path | None:
            run = self.newest_run()
            metrics = run / "metrics.jsonl" if run else None
            if metrics and metrics.exists() and len(metrics.read_text().splitlines()) >= num_steps:
                return run
            return None

        return self.wait_for(enough, f"step {num_steps}")

    def ask_conductor(self, run_dir: Path, path: str, message: object = None) -> bytes:
        """What the conductor of a run answers to an administrator."""
        run = RunFolder(run_dir)
        headers = {"Authorization": f"Bearer {run.credentials()['admin']}", "Content-Type": messages.CONTENT_TYPE}
        body = None if message is None else messages.encode(message)
        request = urllib.request.Request(f"{run.url('conductor')}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read()

    def processes_of(self, run_dir: Path) -> dict[str, psutil.Process]:
        """The processes of a run by role, found by their command lines."""
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if str(run_dir) in words and "polyrhythm" in words:
                role = words[words.index("polyrhythm") + 1]
                name = words[words.index("--name") + 1] if "--name" in words else role
                found[name] = process
        return found


@pytest.fixture
def cli(work_dir, tiny_model_dir) -> Cli:
    return Cli(work_dir, tiny_model_dir)
