"""Run a configuration with real processes and return the metrics of its steps."""

import os
import tempfile
from pathlib import Path
from typing import Any

from polyrhythm.cluster.cores import num_cores, plan_threads
from polyrhythm.cluster.launcher import make_launcher
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.cluster.supervisor import Supervisor
from polyrhythm.config import load_config
from polyrhythm.observe.loggers.jsonl import read_metrics
from polyrhythm.observe.terminal.view import make_view
from polyrhythm.weights.pretrained import resolve_model

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


def metrics_of_run(files: list[Path], flags: dict[str, Any]) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as output_dir:
        config = load_config(files, {**flags, "output_dir": output_dir})
        folder = RunFolder.create(config, resolve_model(config.model))
        with Supervisor(
            folder, config, plan_threads(config, num_cores()), make_launcher(config.cluster.kind, folder)
        ) as run:
            run.watch(make_view("none", folder.path))
        return read_metrics(folder.path)
