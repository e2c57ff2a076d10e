"""The process that speaks with Ray dies: whoever it has started is lost, and that is seen."""

import os
import signal
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import psutil

from polyrhythm.cluster.launcher import ProcessSpec
from polyrhythm.cluster.ray.launcher import RayLauncher
from polyrhythm.cluster.run_folder import RunFolder
from polyrhythm.config import ClusterConfig, Config, save_config


def test_a_process_that_cannot_be_started_is_told_to_have_ended(tmp_path, monkeypatch):
    from polyrhythm.cluster.ray.driver import Placed

    events: list[Mapping[str, Any]] = []
    request = {"process": 7, "name": "engine-0", "role": "engine"}
    placed = Placed(RunFolder(tmp_path), Config(), request, cast(Any, SimpleNamespace(tell=events.append)))
    monkeypatch.setattr(placed, "_place", lambda: 1 / 0)  # anything that is no mistake of Ray
    placed.run()
    assert events == [{"process": 7, "returncode": 1, "why": "it could not be placed: division by zero"}]


def test_a_driver_that_dies_is_seen_and_the_next_process_has_another(cli, cluster, tmp_path):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    keys = {"address": cluster.address, "token_file": str(cluster.token_file)}
    save_config(Config(cluster=ClusterConfig(kind="ray", **keys)), folder.path / "config.json")
    launcher = RayLauncher(folder)
    spec = ProcessSpec("engine-0", "engine", [sys.executable, "-c", "print('here', flush=True); input()"])
    try:
        lost = launcher.start(spec)
        cli.wait_for(lambda: "here" in lost.log.read_text(), "the start")
        (driver,) = [
            child for child in psutil.Process().children() if "polyrhythm.cluster.ray.driver" in child.cmdline()
        ]
        os.kill(driver.pid, signal.SIGKILL)
        cli.wait_for(lambda: lost.returncode is not None, "the end")
        assert "the process that speaks with Ray has ended" in lost.describe_end()
        again = launcher.start(spec)
        cli.wait_for(lambda: lost.log.read_text().count("here") == 2, "the second start")
        assert again.returncode is None
        again.kill()
        assert again.returncode == -signal.SIGKILL
    finally:
        launcher.close()
    assert not [child for child in psutil.Process().children() if "serve" in child.cmdline()]
