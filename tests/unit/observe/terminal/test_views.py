"""The views, rendered to text."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from polyrhythm.observe.loggers.jsonl import JsonlLogger
from polyrhythm.observe.terminal.live import LiveView, frame_lines
from polyrhythm.observe.terminal.plain import PlainView, step_line
from polyrhythm.observe.terminal.summary import summary
from polyrhythm.observe.terminal.timeline import timeline_text
from polyrhythm.observe.terminal.view import NoView, make_view

NOW_S = 1_000_000.0


def engine(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name, "url": "http://127.0.0.1:1", "state": "ready", "policy_version": 3, "num_running": 24,
        "num_waiting": 2, "tokens_per_s": 812.3, "busy": True, "in_flight_groups": 3,
    } | changes  # fmt: skip


def make_status(**changes: Any) -> dict[str, Any]:
    return {
        "step": 3, "num_steps": 20, "schedule": "periodic", "policy_version": 3,
        "ranks": [{"name": "trainer", "doing": "forward_backward", "since_s": 2.0}],
        "engines": [engine("engine-0"), engine("engine-1", state="loading")],
        "groups": {"expected": 8, "dispatched": 7, "complete": 4, "taken": 2},
        "last": {"time/step_s": 6.0, "train/grad_norm": 0.5, "onpolicy/violations": 0.0},
        "history": {"reward": [0.1, 0.2, 0.4], "accuracy": [0.1, 0.2, 0.3]},
        "samples": [{"prompt": "41 + 22 =", "completion": " 63\n", "reward": 1.0}],
        "waiting": "the trainer waits for engine-0",
        "spans": [{"process": "engine-0", "activity": "generate", "start_s": NOW_S - 30, "end_s": NOW_S}],
        "failure": None,
    } | changes  # fmt: skip


def render(status: dict[str, Any], width: int = 80, height: int = 23) -> list[str]:
    return [line.plain for line in frame_lines(status, [6.0], NOW_S, width, height)]


def test_the_frame_says_where_the_run_is_and_who_does_what() -> None:
    text = "\n".join(render(make_status()))
    for expected in (
        "step 4/20", "1:42 left", "periodic, policy v3", "reward 0.400", "accuracy 0.300", "4 of 8 complete",
        "7 sent out", "2 taken", "6.0 s", "off-policy 0", "forward_backward for 2.0 s", "812 tok/s 24 running +2",
        "loading", "waiting: the trainer waits for engine-0", "41 + 22 = │ 63⏎", " 1.00",
    ):  # fmt: skip
        assert expected in text, expected


def test_the_frame_before_the_first_engine_and_the_first_step() -> None:
    status = make_status(engines=[], last={}, samples=[], spans=[], history={"reward": [], "accuracy": []})
    text = "\n".join(line.plain for line in frame_lines(status, [], NOW_S, 80, 23))
    for expected in ("step 1/20", "--:-- left", "last step  none yet", "no engine has joined yet"):
        assert expected in text, expected


@pytest.mark.parametrize("num_engines", [1, 3, 40])
@pytest.mark.parametrize("num_ranks", [1, 2, 64])
@pytest.mark.parametrize(("width", "height"), [(80, 23), (60, 15), (200, 60), (40, 5)])
def test_the_frame_fits_the_terminal(num_engines: int, num_ranks: int, width: int, height: int) -> None:
    ranks = [{"name": f"trainer-{rank}", "doing": "reduce", "since_s": 1.0} for rank in range(num_ranks)]
    engines = [engine(f"engine-{index}" + "日本" * 10) for index in range(num_engines)]
    samples = [{"prompt": "p" * 500, "completion": "日" * 500, "reward": 0.0}] * 10
    history = {"reward": [0.5] * 500, "accuracy": [None] * 500}
    status = make_status(
        ranks=ranks, engines=engines, samples=samples, history=history, num_steps=1000, waiting="w" * 300,
        failure="f" * 300,
    )  # fmt: skip
    lines = render(status, width, height)
    assert len(lines) <= height
    assert max(cell_len(line) for line in lines) <= width
    if height >= 15:
        assert any("trainer" in line for line in lines) and any("failure" in line for line in lines)
    if num_engines == 40 and 15 <= height < 40:
        assert re.search(r"\d+ more engines", "\n".join(lines))
    assert " 0 more" not in "\n".join(lines)
    if num_ranks == 64 and height == 23:
        assert re.search(r"and \d+ more ranks", "\n".join(lines))
    if height >= 23:
        assert any("│日" in line for line in lines)


def test_what_a_model_or_another_machine_writes_cannot_command_the_terminal(tmp_path: Path) -> None:
    evil = "[bold red]x[/] \x1b[2J\x1b]0;title\x07"
    status = make_status(
        engines=[engine(evil, state=evil)],
        samples=[{"prompt": [{"role": "user", "content": evil}], "completion": evil, "reward": None}],
        waiting=evil,
        failure=evil,
    )
    console = Console(file=io.StringIO(), record=True, width=100, height=40, force_terminal=True, color_system=None)
    view = LiveView(tmp_path, console, clock=lambda: NOW_S)
    view.update(status)
    shown = console.export_text()
    view.close("finished")
    assert "[bold red]x[/] �[2J�]0;title�" in shown
    assert "\x1b[2J" not in console.file.getvalue() and "\x07" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_timeline_shows_what_took_most_of_each_stretch() -> None:
    def span(activity: str, start_s: float, end_s: float, process: str = "trainer") -> dict[str, Any]:
        return {"process": process, "activity": activity, "start_s": NOW_S + start_s, "end_s": NOW_S + end_s}

    spans = [
        span("generate", -500, 0, process="another"),
        span("load", -500, -50),
        span("wait", -40, -30),
        span("forward_backward", -30, -13),
        span("update", -13, -10),
        span("checkpoint", -10, 0),
    ]
    assert timeline_text(spans, "trainer", NOW_S, 6).plain == "▒ ·▓▓░"


def test_plain_lines_come_once_per_step_and_none_is_lost(tmp_path: Path) -> None:
    stream = io.StringIO()
    logger, view = JsonlLogger(tmp_path), PlainView(tmp_path, stream)
    history: dict[str, list[float]] = {"reward": [], "accuracy": []}
    view.update(make_status(history=history))
    assert stream.getvalue() == ""
    for step in range(3):
        logger.log(step, {"reward/mean": step / 10, "reward/accuracy": step / 10, "time/step_s": 2.5})
    view.update(make_status(history={"reward": [0.0, 0.1], "accuracy": [0.0, 0.1]}))
    view.update(make_status(history={"reward": [0.0, 0.1, 0.2], "accuracy": [0.0, 0.1, 0.2]}))
    logger.log(3, {"reward/mean": 0.3})
    view.close("finished")
    lines = stream.getvalue().splitlines()
    assert lines[:4] == [
        "step 1/20  reward 0.000  accuracy 0.000  step_s 2.5",
        "step 2/20  reward 0.100  accuracy 0.100  step_s 2.5",
        "step 3/20  reward 0.200  accuracy 0.200  step_s 2.5",
        "step 4/20  reward 0.300",
    ]
    assert "finished after 4 steps" in lines


def test_plain_lines_say_a_failure_once(tmp_path: Path) -> None:
    stream = io.StringIO()
    view = PlainView(tmp_path, stream)
    for _ in range(3):
        view.update(make_status(failure="engine-0 died"))
    assert stream.getvalue().count("engine-0 died") == 1


def test_a_stream_without_unicode_does_not_end_the_run(tmp_path: Path) -> None:
    with JsonlLogger(tmp_path) as logger:
        logger.log(0, {"reward/mean": 0.5})
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii", write_through=True)
    PlainView(tmp_path, stream).close("finished")
    assert b"finished after 1 step\n" in buffer.getvalue()


def test_the_end_shows_the_curve_and_where_things_are(tmp_path: Path) -> None:
    with JsonlLogger(tmp_path) as logger:
        for step in range(5):
            logger.log(step, {"reward/mean": step / 4, "reward/accuracy": step / 8})
    (tmp_path / "logs").mkdir()
    console = Console(file=io.StringIO(), record=True, width=500)
    console.print(summary(tmp_path, "interrupted"))
    text = console.export_text()
    for expected in (
        "interrupted after 5 steps",
        "accuracy",
        "reward",
        "┤",
        f"run folder: {tmp_path}\n",
        "  metrics.jsonl",
    ):
        assert expected in text, expected
    assert "  logs  " in text
    assert "config.toml" not in text and "samples.jsonl" not in text, "one is not there, one is empty"


def test_rewards_without_an_accuracy_have_no_curve_of_it(tmp_path: Path) -> None:
    with JsonlLogger(tmp_path) as logger:
        logger.log(0, {"reward/mean": 40.0, "reward/excluded": 2})
    console = Console(file=io.StringIO(), record=True, width=500)
    console.print(summary(tmp_path, "finished"))
    assert "accuracy" not in console.export_text()
    assert step_line({"step": 0, "reward/mean": 40.0, "reward/excluded": 2}, 3) == (
        "step 1/3  reward 40.000  excluded 2 (rewards that failed: logs/conductor.log)"
    )


def test_auto_is_plain_without_a_terminal(tmp_path: Path) -> None:
    assert isinstance(make_view("auto", tmp_path), PlainView)
    assert isinstance(make_view("none", tmp_path), NoView)


def test_auto_is_live_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    view = make_view("auto", tmp_path)
    view.close("finished")
    assert isinstance(view, LiveView)
