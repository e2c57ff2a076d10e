"""The status of a run, made by hand: whatever a test does not say is ordinary."""

from typing import Any

from polyrhythm.observe.activity import Activity
from polyrhythm.observe.status import EngineState, EngineView, GroupCounts, RankView, RunStatus


def make_engine(name: str, state: str = "ready", **changes: Any) -> EngineView:
    return EngineView(**({"name": name, "url": "http://127.0.0.1:1", "state": EngineState(state)} | changes))


def make_rank(name: str = "trainer", doing: Activity = Activity.WAIT, for_s: float = 2.0) -> RankView:
    return RankView(name, doing, for_s)


def make_status(**changes: Any) -> RunStatus:
    ordinary: dict[str, Any] = {
        "num_steps": 20, "policy_version": changes.get("num_finished_steps", 0), "trainer": make_rank(),
        "ranks": [make_rank()], "num_expected_engines": 1, "engines": [], "groups": GroupCounts(expected=8),
    }  # fmt: skip
    return RunStatus(**(ordinary | changes))
