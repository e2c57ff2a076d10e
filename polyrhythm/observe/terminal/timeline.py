"""What each process did over the last minute, one character per stretch of time."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from operator import itemgetter

from rich.text import Text

from polyrhythm.observe.activity import Activity, Span

WINDOW_S = 60.0
GLYPHS = {
    Activity.GENERATE: ("█", "green"),
    Activity.FORWARD_BACKWARD: ("▓", "cyan"),
    Activity.AGREE: ("╌", "red"),
    Activity.REDUCE: ("▚", "red"),
    Activity.UPDATE: ("▆", "magenta"),
    Activity.PUBLISH: ("▄", "yellow"),
    Activity.LOAD: ("▒", "blue"),
    Activity.WAIT: ("·", "bright_black"),
}
OTHER = ("░", "white")


def glyph(activity: Activity) -> tuple[str, str]:
    """Character and colour of an activity."""
    return GLYPHS.get(activity, OTHER)


def timeline_text(spans: Iterable[Span], process: str, now_s: float, width: int) -> Text:
    """The process's last `WINDOW_S` seconds: in each cell what took most of it; blank where nothing is known."""
    cell_s = WINDOW_S / width
    start_s = now_s - WINDOW_S
    seconds: list[dict[Activity, float]] = [defaultdict(float) for _ in range(width)]
    for span in spans:
        if span.process != process or span.end_s <= start_s:
            continue
        first = max(0, int((span.start_s - start_s) / cell_s))
        last = min(width - 1, int((span.end_s - start_s) / cell_s))
        for cell in range(first, last + 1):
            cell_start_s = start_s + cell * cell_s
            overlap_s = min(span.end_s, cell_start_s + cell_s) - max(span.start_s, cell_start_s)
            if overlap_s > 0:
                seconds[cell][span.activity] += overlap_s
    text = Text(no_wrap=True)
    for by_activity in seconds:
        longest, _ = max(by_activity.items(), key=itemgetter(1), default=(None, 0.0))
        character, colour = glyph(longest) if longest else (" ", "")
        text.append(character, style=colour)
    return text


def legend_entries(activities: Collection[Activity]) -> list[Text]:
    """The characters of these activities with their meaning; what has no character of its own shares one."""
    entries = [_entry(glyph(activity), activity) for activity in GLYPHS if activity in activities]
    others = [activity for activity in Activity if activity in activities and activity not in GLYPHS]
    return [*entries, _entry(OTHER, ", ".join(others))] if others else entries


def _entry(mark: tuple[str, str], meaning: str) -> Text:
    return Text.assemble(mark, f" {meaning}")
