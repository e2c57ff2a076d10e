"""What the live view shows, as lines that fit a terminal: progress, metrics, processes, who waits, what the model writes. Pure."""

from collections.abc import Iterable, Sequence

from rich.text import Text

from polyrhythm.observe.activity import Span
from polyrhythm.observe.status import EngineState, EngineView, RankView, RunStatus, SampleView
from polyrhythm.observe.terminal.curve import plot_lines, sparkline
from polyrhythm.observe.terminal.text import first_cells, flow, last_cells, wrap
from polyrhythm.observe.terminal.timeline import WINDOW_S, legend_entries, timeline_text

MAX_NAME_WIDTH = 20
MIN_TIMELINE_WIDTH = 10
DOING_WIDTHS = 4
"""In steps of this many cells, so that the timeline does not jump with every digit."""
STEPS_IN_ETA = 5
MIN_SAMPLE_LINES = 2
PLOT_HEIGHT = 8
WIDE, HIGH = 110, 32
"""From this size on there is room for a curve and a table of metrics."""
LAST_STEP = (
    ("time/step_s", "{:.1f} s"),
    ("generate/tokens_per_s", "{:.0f} tokens/s"),
    ("completion/tokens_mean", "length {:.1f}"),
    ("train/entropy", "entropy {:.2f}"),
    ("kl/k3", "KL {:.2g}"),
    ("train/learning_rate", "lr {:.1e}"),
    ("train/grad_norm", "grad norm {:.2g}"),
    ("mismatch/logprob_abs_mean", "mismatch {:.0e}"),
    ("onpolicy/violations", "off-policy {:.0f}"),
)
"""Metric and how it is written in the line of the last step."""
TABLE = (
    ("completion/tokens_mean", "completion length", "{:.1f}"),
    ("completion/truncated_fraction", "cut off", "{:.0%}"),
    ("train/entropy", "entropy", "{:.3f}"),
    ("kl/k3", "KL", "{:.3g}"),
    ("train/learning_rate", "learning rate", "{:.2e}"),
    ("train/grad_norm", "gradient norm", "{:.3g}"),
    ("groups/zero_variance", "groups of equal rewards", "{:.0f}"),
    ("data/epoch", "epoch", "{:.2f}"),
    ("tokens/total_generated", "tokens generated", "{:,.0f}"),
)
"""The same for the table of a large terminal; a curve stands beside what has one."""


def frame_lines(status: RunStatus, now_s: float, width: int, height: int) -> list[Text]:
    """The whole view; engines give way to the head, samples to the engines."""
    is_large = width >= WIDE and height >= HIGH
    head = [_title(status, width), *_curve_lines(status, width, is_large), *_progress_lines(status, width)]
    head += [*flow(_last_step(status, is_large), width), Text()]
    waiting = [Text(line, style="italic") for line in wrap(f"waiting: {status.waiting}", width, max_lines=2)]
    if status.failure:
        waiting += [Text(line, style="bold red") for line in wrap(f"failure: {status.failure}", width, max_lines=3)]
    room = max(2, height - len(head) - len(waiting) - MIN_SAMPLE_LINES - 4)
    lines = [*head, *_process_lines(status, now_s, width, room), *waiting]
    samples = _sample_lines(status.samples, width, height - len(lines) - 2)
    if samples:
        lines += [Text(), Text("last step wrote", style="bold"), *samples]
    for line in lines:
        line.truncate(width)
    return lines[:height]


def starting_lines(num_engines: int, num_ranks: int) -> list[Text]:
    """What is shown before the conductor answers."""
    return [
        Text.assemble(("polyrhythm ", "bold"), f"starting: {starting_processes(num_engines, num_ranks)}"),
        Text(),
        Text("conductor  reads the task and starts the workers that score"),
        Text(
            f"{_count(num_engines, 'engine'):<10} load the model" if num_engines > 1 else "engine     loads the model"
        ),
        Text("trainer    loads the model and publishes its weights; then the first step begins"),
    ]


def starting_processes(num_engines: int, num_ranks: int) -> str:
    ranks = "trainer" if num_ranks == 1 else f"{num_ranks} trainer ranks"
    return f"conductor, {_count(num_engines, 'engine')}, {ranks}"


def _title(status: RunStatus, width: int) -> Text:
    num_finished, num_steps = status.num_finished_steps, status.num_steps
    before = f"step {status.step_number}/{num_steps} "
    after = f" {_time_left(status)}  {status.schedule}"
    after += "" if status.policy_version is None else f", policy v{status.policy_version}"
    bar_width = min(24, width - len("polyrhythm ") - len(before) - len(after))
    title = Text.assemble(("polyrhythm ", "bold"), before)
    return title.append_text(_bar(num_finished / num_steps, bar_width)).append(after)


def _time_left(status: RunStatus) -> str:
    num_left = status.num_steps - status.num_finished_steps
    if num_left == 0:
        return "done"
    recent = [seconds for seconds in status.curves.get("time/step_s", [])[-STEPS_IN_ETA:] if seconds is not None]
    if not recent:
        return "--:-- left"
    minutes, seconds = divmod(round(sum(recent) / len(recent) * num_left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"


def _curve_lines(status: RunStatus, width: int, is_large: bool) -> list[Text]:
    """Reward and accuracy, in a line each half as wide or, with enough room, a plot beside a table of metrics."""
    rewards, accuracies = status.curves.get("reward/mean", []), status.curves.get("reward/accuracy", [])
    has_accuracy = any(accuracy is not None for accuracy in accuracies)
    half = (width - 2) // 2
    line = _sparkline("reward", rewards, half if has_accuracy else width)
    if has_accuracy:
        line.pad_right(max(0, half + 2 - line.cell_len))
        line.append_text(_sparkline("accuracy", accuracies, half))
    if not is_large or not rewards:
        return [line]
    first_step = status.num_finished_steps - len(rewards) + 1
    plot = [Text("reward", style="bold")]
    plot += [Text(row, style="cyan") for row in plot_lines(rewards, half, PLOT_HEIGHT, max(1, first_step))]
    return [line, Text(), *_side_by_side(plot, _table(status, width - half - 4), half + 4), Text()]


def _table(status: RunStatus, width: int) -> list[Text]:
    rows = []
    for metric, name, form in TABLE:
        if (value := status.last_metrics.get(metric)) is not None:
            label = f"{name:<24}{form.format(value):>12}  "
            rows.append(Text.assemble(label, (sparkline(status.curves.get(metric, []), width - len(label)), "cyan")))
    return rows


def _side_by_side(left: list[Text], right: list[Text], right_at: int) -> list[Text]:
    lines = []
    for row in range(max(len(left), len(right))):
        line = left[row].copy() if row < len(left) else Text()
        if row < len(right):
            line.pad_right(right_at - line.cell_len)
            line.append_text(right[row])
        lines.append(line)
    return lines


def _progress_lines(status: RunStatus, width: int) -> list[Text]:
    groups = status.groups
    bar = Text("groups   ").append_text(_bar(groups.complete / max(1, groups.expected), 16)).append(" ")
    counts = (
        f"{groups.complete} of {groups.expected} complete",
        f"{groups.dispatched} sent out",
        f"{groups.taken} taken by the trainer",
    )
    return flow(counts, width, start=bar)


def _last_step(status: RunStatus, is_large: bool) -> list[str]:
    """What is not in the table, if there is one."""
    last, in_table = status.last_metrics, {metric for metric, _, _ in TABLE} if is_large else set()
    shown = [(metric, form) for metric, form in LAST_STEP if metric not in in_table]
    values = [form.format(value) for metric, form in shown if (value := last.get(metric)) is not None]
    if excluded := last.get("reward/excluded"):
        values.append(f"{excluded:.0f} rewards failed")
    first, *others = values or ["none yet"]
    return [f"last step  {first}", *others]


def _sparkline(name: str, values: Sequence[float | None], width: int) -> Text:
    latest = f"{values[-1]:.3f}" if values and values[-1] is not None else "-"
    label = f"{name} {latest} "
    return Text.assemble(label, (sparkline(values, width - len(label)), "cyan"))


def _bar(fraction: float, width: int) -> Text:
    filled = round(min(1.0, max(0.0, fraction)) * width)
    return Text.assemble(("━" * filled, "green"), ("─" * (width - filled), "bright_black"))


def _process_lines(status: RunStatus, now_s: float, width: int, room: int) -> list[Text]:
    """What each process did in the last minute and does now; columns are as wide as what stands in them."""
    # Finished spans come with the status; what a rank does now is a span without an end.
    spans = [*status.spans, *(Span(rank.name, rank.doing, now_s - rank.for_s, now_s) for rank in status.ranks)]
    ranks, engines = [(rank.name, _rank_doing(rank)) for rank in status.ranks], [
        (engine.name, _engine_doing(engine)) for engine in status.engines
    ]  # fmt: skip
    shown = _as_many_as_fit(ranks, room - min(len(engines), room // 2), "ranks")
    shown += _as_many_as_fit(engines, room - len(shown), "engines")
    name_width = max((len(first_cells(name, MAX_NAME_WIDTH)) for name, doing in shown if doing), default=0)
    longest = max((len(doing) for _, doing in shown), default=0)
    doing_width = min(longest + -longest % DOING_WIDTHS, width // 2)
    timeline_width = max(MIN_TIMELINE_WIDTH, width - name_width - doing_width - 3)
    lines = []
    for name, doing in shown:
        line = Text(first_cells(name, MAX_NAME_WIDTH if doing else width))
        if doing:
            line.pad_right(name_width + 1 - line.cell_len)
            line.append_text(timeline_text(spans, name, now_s, timeline_width)).append(f"  {doing}")
        lines.append(line)
    if missing := _missing_engines(status):
        lines.append(Text(missing, style="bright_black"))
    happened = {span.activity for span in spans if span.end_s > now_s - WINDOW_S}
    return [Text(f"the last {WINDOW_S:.0f} s", style="bold"), *lines, *flow(legend_entries(happened), width, "  ")]


def _missing_engines(status: RunStatus) -> str:
    num_missing = status.num_expected_engines - len(status.engines)
    if num_missing <= 0 or status.num_finished_steps > status.first_step:
        return ""
    return f"{_count(num_missing, 'engine')} {'has' if num_missing == 1 else 'have'} not joined yet"


def _as_many_as_fit(rows: list[tuple[str, str]], room: int, what: str) -> list[tuple[str, str]]:
    """A row that only says how many there are has nothing that it does."""
    if len(rows) <= max(1, room):
        return rows
    shown = rows[: max(0, room - 1)]
    return [*shown, (f"{'and ' if shown else ''}{len(rows) - len(shown)} more {what}", "")]


def _rank_doing(rank: RankView) -> str:
    return f"{rank.doing} for {rank.for_s:.1f} s"


def _engine_doing(engine: EngineView) -> str:
    if engine.state is not EngineState.READY:
        return engine.state
    version = "" if engine.policy_version is None else f"v{engine.policy_version} "
    queued = f" +{engine.num_waiting}" if engine.num_waiting else ""
    return f"{version}{engine.tokens_per_s:.0f} tok/s {engine.num_running} running{queued}"


def _sample_lines(samples: Iterable[SampleView], width: int, room: int) -> list[Text]:
    lines = []
    for sample in list(samples)[: max(0, room)]:
        label = "    -" if sample.reward is None else f"{sample.reward:5.2f}"
        completion = first_cells(sample.completion, (width - 10) // 2)
        prompt = last_cells(sample.prompt, width - 10 - Text(completion).cell_len)
        colour = "bright_black" if sample.reward is None else "green" if sample.reward > 0 else "red"
        lines.append(Text.assemble((label, colour), "  ", (prompt, "bright_black"), " │", (completion, "bold")))
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
