"""The live terminal view: progress, reward, what every process does, who waits for whom, what the model writes."""

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from polyrhythm.observe.activity import Span
from polyrhythm.observe.status import EngineState, EngineView, RankView, RunStatus, SampleView
from polyrhythm.observe.terminal.curve import sparkline
from polyrhythm.observe.terminal.summary import summary
from polyrhythm.observe.terminal.text import first_cells, last_cells, visible
from polyrhythm.observe.terminal.timeline import WINDOW_S, legend, timeline_text

NAME_WIDTH = 10
DOING_WIDTH = 28
STEPS_IN_ETA = 5
MIN_SAMPLE_LINES = 2


class LiveView:
    """Redraws in place on every update; leaves the summary behind."""

    def __init__(self, run_dir: Path, console: Console, clock: Callable[[], float] = time.time) -> None:
        self._run_dir = run_dir
        self._console = console
        self._clock = clock
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._live.start()

    def update(self, status: RunStatus) -> None:
        self._live.update(self._frame(status), refresh=True)

    def note(self, line: str) -> None:
        self._console.print(visible(line))

    def close(self, outcome: str) -> None:
        self._live.stop()
        self._console.print(summary(self._run_dir, outcome, self._console.width))

    def _frame(self, status: RunStatus) -> Text:
        # One line less than the terminal has: the cursor needs the last one.
        size = self._console.size
        lines = frame_lines(status, self._clock(), size.width, size.height - 1)
        return Text("\n", no_wrap=True, overflow="crop").join(lines)


def frame_lines(status: RunStatus, now_s: float, width: int, height: int) -> list[Text]:
    """The whole view as lines that fit; engines give way to the head, samples to the engines."""
    head = [*_head_lines(status, width), Text()]
    waiting = [legend(), Text(f"waiting: {first_cells(status.waiting, width - 9)}", style="italic")]
    if status.failure:
        waiting.append(Text(first_cells(f"failure: {status.failure}", width), style="bold red"))
    room = max(2, height - len(head) - len(waiting) - MIN_SAMPLE_LINES - 2)
    processes = _process_lines(status, now_s, width, room)
    lines = [*head, *processes, *waiting]
    samples = _sample_lines(status.samples, width, height - len(lines) - 2)
    if samples:
        lines += [Text(), Text("last step wrote", style="bold"), *samples]
    for line in lines:
        line.truncate(width)
    return lines[:height]


def _head_lines(status: RunStatus, width: int) -> list[Text]:
    curves, groups = status.curves, status.groups
    num_finished, num_steps = status.num_finished_steps, status.num_steps
    title = Text.assemble(("polyrhythm ", "bold"), f"step {status.step_number}/{num_steps} ")
    title.append_text(_bar(num_finished / num_steps, 24))
    title.append(f" {_eta(curves.get('time/step_s', []), num_steps - num_finished)}  {status.schedule}")
    title.append("" if status.policy_version is None else f", policy v{status.policy_version}")
    half = (width - 2) // 2
    sparklines = _curve("reward", curves.get("reward/mean", []), half)
    sparklines.pad_right(max(0, half + 2 - sparklines.cell_len))
    sparklines.append_text(_curve("accuracy", curves.get("reward/accuracy", []), half))
    progress = Text("groups   ").append_text(_bar(groups.complete / max(1, groups.expected), 16))
    progress.append(f" {groups.complete} of {groups.expected} complete, {groups.dispatched} sent out, ")
    progress.append(f"{groups.taken} taken by the trainer")
    return [title, sparklines, progress, Text(_last_step(status.last_metrics))]


def _last_step(last: dict[str, float | None]) -> str:
    shown = (
        ("time/step_s", "{:.1f} s"),
        ("generate/tokens_per_s", "{:.0f} tokens/s"),
        ("train/grad_norm", "grad norm {:.2g}"),
        ("mismatch/logprob_abs_mean", "mismatch {:.0e}"),
        ("onpolicy/violations", "off-policy {:.0f}"),
    )
    values = [form.format(last[key]) for key, form in shown if last.get(key) is not None]
    if excluded := last.get("reward/excluded"):
        values.append(f"{excluded:.0f} rewards failed")
    return "last step  " + (", ".join(values) if values else "none yet")


def _curve(name: str, values: list[float | None], width: int) -> Text:
    latest = f"{values[-1]:.3f}" if values and values[-1] is not None else "-"
    label = f"{name} {latest} "
    return Text.assemble(label, (sparkline(values, width - len(label)), "cyan"))


def _bar(fraction: float, width: int) -> Text:
    filled = round(min(1.0, max(0.0, fraction)) * width)
    return Text.assemble(("━" * filled, "green"), ("─" * (width - filled), "bright_black"))


def _eta(step_seconds: list[float | None], num_left: int) -> str:
    recent = [seconds for seconds in step_seconds[-STEPS_IN_ETA:] if seconds is not None]
    if not recent:
        return "--:-- left"
    minutes, seconds = divmod(round(sum(recent) / len(recent) * num_left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"


def _process_lines(status: RunStatus, now_s: float, width: int, room: int) -> list[Text]:
    timeline_width = max(10, width - NAME_WIDTH - DOING_WIDTH - 2)
    ranks, engines = status.ranks, status.engines
    # Finished spans come with the status; what a rank does now is a span without an end.
    spans = [*status.spans, *(_now(rank, now_s) for rank in ranks)]

    def line(process: RankView | EngineView, doing: str) -> Text:
        return _process_line(process.name, spans, doing, now_s, timeline_width)

    rank_lines = [line(rank, f"{rank.doing} for {rank.for_s:.1f} s") for rank in ranks]
    engine_lines = [line(engine, _engine_doing(engine)) for engine in engines]
    lines = _as_many_as_fit(rank_lines, room - min(len(engines), room // 2), "ranks")
    lines += _as_many_as_fit(engine_lines, room - len(lines), "engines")
    if not engines:
        lines.append(Text("no engine has joined yet", style="bright_black"))
    return [Text(f"the last {WINDOW_S:.0f} s", style="bold"), *lines]


def _now(rank: RankView, now_s: float) -> Span:
    return Span(rank.name, rank.doing, now_s - rank.for_s, now_s)


def _as_many_as_fit(lines: list[Text], room: int, what: str) -> list[Text]:
    if len(lines) <= max(1, room):
        return lines
    shown = lines[: max(0, room - 1)]
    return [*shown, Text(f"{'and ' if shown else ''}{len(lines) - len(shown)} more {what}", style="bright_black")]


def _process_line(name: str, spans: list[Span], doing: str, now_s: float, width: int) -> Text:
    line = Text(f"{first_cells(name, NAME_WIDTH - 1):<{NAME_WIDTH}}", no_wrap=True)
    line.append_text(timeline_text(spans, name, now_s, width))
    return line.append(f"  {first_cells(doing, DOING_WIDTH)}")


def _engine_doing(engine: EngineView) -> str:
    if engine.state is not EngineState.READY:
        return engine.state
    queued = f" +{engine.num_waiting}" if engine.num_waiting else ""
    return f"v{engine.policy_version} {engine.tokens_per_s:.0f} tok/s {engine.num_running} running{queued}"


def _sample_lines(samples: list[SampleView], width: int, room: int) -> list[Text]:
    lines = []
    for sample in samples[: max(0, room)]:
        reward = sample.reward
        label = "    -" if reward is None else f"{reward:5.2f}"
        completion = first_cells(sample.completion, (width - 10) // 2)
        prompt = last_cells(sample.prompt, width - 10 - Text(completion).cell_len)
        colour = "bright_black" if reward is None else "green" if reward > 0 else "red"
        lines.append(Text.assemble((label, colour), "  ", (prompt, "bright_black"), " │", (completion, "bold")))
    return lines
