"""The views, rendered to text."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from polyrhythm.observe.activity import Activity, Span
from polyrhythm.observe.loggers.jsonl import JsonlLogger
from polyrhythm.observe.loggers.logger import LoggedRun
from polyrhythm.observe.status import EngineView, GroupCounts, RunStatus, SampleView
from polyrhythm.observe.terminal.frame import frame_lines
from polyrhythm.observe.terminal.live import LiveView
from polyrhythm.observe.terminal.plain import PlainView, step_line
from polyrhythm.observe.terminal.summary import summary
from polyrhythm.observe.terminal.timeline import timeline_text
from polyrhythm.observe.terminal.view import NoView, make_view
from tests.statuses import make_engine, make_rank
from tests.statuses import make_status as make_run_status

NOW_S = 1_000_000.0


def engine(name: str, state: str = "ready") -> EngineView:
    return make_engine(name, state, policy_version=3, num_running=24, num_waiting=2, tokens_per_s=812.3, is_busy=True)


def make_status(**changes: Any) -> RunStatus:
    ordinary = {
        "num_finished_steps": 3, "ranks": [make_rank(doing=Activity.FORWARD_BACKWARD)],
        "engines": [engine("engine-0"), engine("engine-1", "loading")], "groups": GroupCounts(8, 7, 4, 2),
        "last_metrics": {"time/step_s": 6.0, "train/grad_norm": 0.5, "onpolicy/violations": 0.0},
        "curves": {"reward/mean": [0.1, 0.2, 0.4], "reward/accuracy": [0.1, 0.2, 0.3], "time/step_s": [6.0] * 3},
        "samples": [SampleView("41 + 22 =", " 63\n", 1.0)], "waiting": "the trainer waits for engine-0",
        "spans": [Span("engine-0", Activity.GENERATE, NOW_S - 30, NOW_S)],
    }  # fmt: skip
    return make_run_status(**(ordinary | changes))


def render(status: RunStatus, width: int = 80, height: int = 23) -> list[str]:
    return [line.plain for line in frame_lines(status, NOW_S, width, height)]


def test_the_frame_says_where_the_run_is_and_who_does_what() -> None:
    text = "\n".join(render(make_status()))
    for expected in (
        "step 4/20", "1:42 left", "periodic, policy v3", "reward 0.400", "accuracy 0.300", "4 of 8 complete",
        "7 sent out", "2 taken", "6.0 s", "off-policy 0", "forward_backward for 2.0 s", "812 tok/s 24 running +2",
        "loading", "waiting: the trainer waits for engine-0", "41 + 22 = │ 63⏎", " 1.00",
    ):  # fmt: skip
        assert expected in text, expected


def test_the_frame_before_the_first_engine_and_the_first_step() -> None:
    status = make_status(
        engines=[], last_metrics={}, samples=[], spans=[], curves={}, num_finished_steps=0, policy_version=None
    )
    text = "\n".join(line.plain for line in frame_lines(status, NOW_S, 80, 23))
    for expected in ("step 1/20", "--:-- left", "last step  none yet", "1 engine has not joined yet"):
        assert expected in text, expected


LAST_METRICS = {
    "time/step_s": 7.2, "generate/tokens_per_s": 1234.0, "completion/tokens_mean": 3.9, "completion/truncated_fraction": 0.13,
    "train/entropy": 0.412, "kl/k3": 0.0123, "train/learning_rate": 1e-5, "train/grad_norm": 3.62,
    "mismatch/logprob_abs_mean": 4.3e-7, "onpolicy/violations": 0.0, "reward/excluded": 3.0,
}  # fmt: skip


def busy_status() -> RunStatus:
    """A run in which everything that can be long is long."""
    spans = [Span("trainer", activity, NOW_S - 9, NOW_S - 8) for activity in Activity if activity is not Activity.START]
    engines = [
        make_engine(f"engine-{index}", policy_version=1812, num_running=128, num_waiting=64, tokens_per_s=12_812.3)
        for index in range(2)
    ]
    return make_status(
        num_steps=2000, num_finished_steps=1812, ranks=[make_rank("trainer-10", Activity.FORWARD_BACKWARD, 123.4)],
        engines=engines, groups=GroupCounts(1024, 1000, 900, 800), last_metrics=LAST_METRICS, spans=spans,
        waiting="engines wait for the trainer, which has taken 800 of 1024 groups, and for nobody else in the whole run",
        curves={"reward/mean": [0.25, 0.5] * 500, "train/entropy": [0.4] * 1000, "time/step_s": [70.0] * 1000},
    )  # fmt: skip


def test_nothing_is_cut_off_at_80_columns() -> None:
    lines = render(busy_status(), 80, 23)
    text = "\n".join(lines)
    assert max(map(cell_len, lines)) <= 80 and len(lines) <= 23
    for expected in (
        "policy v1812", "3:39:20 left", "900 of 1024 complete", "1000 sent out", "800 taken by the trainer",
        "1234 tokens/s", "length 3.9", "entropy 0.41", "KL 0.012", "lr 1.0e-05", "mismatch 4e-07", "off-policy 0",
        "3 rewards failed", "trainer-10 ", "forward_backward for 123.4 s", "v1812 12812 tok/s 128 running +64",
        "░ score, commit, checkpoint, verify, save, idle", "in the whole run",
    ):  # fmt: skip
        assert expected in text, expected
    assert "…" not in text and "accuracy" not in text


def test_a_large_terminal_shows_a_curve_and_more_metrics() -> None:
    lines = render(busy_status(), 140, 39)
    text = "\n".join(lines)
    assert max(map(cell_len, lines)) <= 140 and len(lines) <= 39
    for expected in ("completion length", "entropy", "0.412", "learning rate", "1.00e-05", "KL", "0.0123"):
        assert expected in text, expected
    assert re.search(r"step 813 +1812$", text, re.MULTILINE), "the curve has the numbers of its steps"
    assert sum("┤" in line for line in lines) == 8


def test_a_finished_run_waits_for_nothing() -> None:
    text = "\n".join(
        render(make_status(num_finished_steps=20, policy_version=19, waiting="nobody: all steps are done"))
    )
    assert "step 20/20" in text and "done" in text and "left" not in text


def test_a_start_is_shown_before_anybody_answers(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), record=True, width=80, height=24, force_terminal=True)
    view = LiveView(tmp_path, console)
    view.starting(2, 1)
    assert "starting: conductor, 2 engines, trainer" in console.export_text()
    view.close("interrupted")
    stream = io.StringIO()
    PlainView(tmp_path, stream).starting(1, 2)
    assert stream.getvalue() == "starting: conductor, 1 engine, 2 trainer ranks\n"


@pytest.mark.parametrize("num_engines", [1, 3, 40])
@pytest.mark.parametrize("num_ranks", [1, 2, 64])
@pytest.mark.parametrize(("width", "height"), [(80, 23), (60, 15), (200, 60), (40, 5)])
def test_the_frame_fits_the_terminal(num_engines: int, num_ranks: int, width: int, height: int) -> None:
    ranks = [make_rank(f"trainer-{rank}", Activity.REDUCE) for rank in range(num_ranks)]
    engines = [engine(f"engine-{index}" + "日本" * 10) for index in range(num_engines)]
    samples = [SampleView("p" * 500, "日" * 500, 0.0)] * 10
    curves: dict[str, Any] = {"reward/mean": [0.5] * 500, "reward/accuracy": [None] * 500}
    status = make_status(
        ranks=ranks, engines=engines, samples=samples, curves=curves, num_steps=1000, waiting="w" * 300,
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
        engines=[engine(evil)],
        samples=[SampleView(evil, evil, None)],
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
    def span(activity: Activity, start_s: float, end_s: float, process: str = "trainer") -> Span:
        return Span(process, activity, NOW_S + start_s, NOW_S + end_s)

    spans = [
        span(Activity.GENERATE, -500, 0, process="another"),
        span(Activity.LOAD, -500, -50),
        span(Activity.WAIT, -40, -30),
        span(Activity.FORWARD_BACKWARD, -30, -13),
        span(Activity.UPDATE, -13, -10),
        span(Activity.CHECKPOINT, -10, 0),
    ]
    assert timeline_text(spans, "trainer", NOW_S, 6).plain == "▒ ·▓▓░"


def test_plain_lines_come_once_per_step_and_none_is_lost(tmp_path: Path) -> None:
    stream = io.StringIO()
    logger, view = JsonlLogger(LoggedRun(tmp_path)), PlainView(tmp_path, stream)
    view.update(make_status(num_finished_steps=0))
    assert stream.getvalue() == ""
    for step in (1, 2, 3):
        logger.log(step, {"reward/mean": step / 10, "reward/accuracy": step / 10, "time/step_s": 2.5})
    view.update(make_status(num_finished_steps=2))
    view.update(make_status(num_finished_steps=3))
    logger.log(4, {"reward/mean": 0.4})
    view.close("finished")
    lines = stream.getvalue().splitlines()
    assert lines[:4] == [
        "step 1/20  reward 0.100  accuracy 0.100  step_s 2.5",
        "step 2/20  reward 0.200  accuracy 0.200  step_s 2.5",
        "step 3/20  reward 0.300  accuracy 0.300  step_s 2.5",
        "step 4/20  reward 0.400",
    ]
    assert "finished after 4 steps" in lines


def test_after_a_resume_only_new_steps_are_printed_and_counted_on(tmp_path: Path) -> None:
    with JsonlLogger(LoggedRun(tmp_path)) as logger:
        for step in (1, 2, 3, 4):
            logger.log(step, {"reward/mean": step / 10})
    stream = io.StringIO()
    view = PlainView(tmp_path, stream, first_step=3)
    view.update(make_status(first_step=3, num_finished_steps=3))
    assert stream.getvalue() == ""
    view.update(make_status(first_step=3, num_finished_steps=4))
    assert stream.getvalue() == "step 4/20  reward 0.400\n"


def test_plain_lines_say_a_failure_once(tmp_path: Path) -> None:
    stream = io.StringIO()
    view = PlainView(tmp_path, stream)
    for _ in range(3):
        view.update(make_status(failure="engine-0 died"))
    assert stream.getvalue().count("engine-0 died") == 1


def test_a_stream_without_unicode_does_not_end_the_run(tmp_path: Path) -> None:
    with JsonlLogger(LoggedRun(tmp_path)) as logger:
        logger.log(1, {"reward/mean": 0.5})
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii", write_through=True)
    PlainView(tmp_path, stream).close("finished")
    assert b"finished after 1 step\n" in buffer.getvalue()


def test_the_end_shows_the_curve_and_where_things_are(tmp_path: Path) -> None:
    with JsonlLogger(LoggedRun(tmp_path)) as logger:
        for step in range(1, 6):
            logger.log(step, {"reward/mean": step / 5, "reward/accuracy": step / 10})
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
    with JsonlLogger(LoggedRun(tmp_path)) as logger:
        logger.log(1, {"reward/mean": 40.0, "reward/excluded": 2})
    console = Console(file=io.StringIO(), record=True, width=500)
    console.print(summary(tmp_path, "finished"))
    assert "accuracy" not in console.export_text()
    assert step_line({"step": 1, "reward/mean": 40.0, "reward/excluded": 2}, 3) == (
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
