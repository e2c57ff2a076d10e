"""What each lane did over the last minute, one character per stretch of time."""

from collections import defaultdict
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from rich.text import Text

WINDOW_S = 60.0
GLYPHS = {
    "generate": ("█", "green"),
    "forward_backward": ("▓", "cyan"),
    "reduce": ("▚", "red"),
    "update": ("▆", "magenta"),
    "publish": ("▄", "yellow"),
    "load": ("▒", "blue"),
    "wait": ("·", "bright_black"),
}
OTHER = ("░", "white")


def glyph(what: str) -> tuple[str, str]:
    """Character and colour of an activity."""
    return GLYPHS.get(what, OTHER)


def lane_text(spans: Iterable[dict[str, Any]], lane: str, now_s: float, width: int) -> Text:
    """The lane's last `WINDOW_S` seconds: in each cell what took most of it; blank where nothing is known."""
    cell_s = WINDOW_S / width
    start_s = now_s - WINDOW_S
    seconds: list[dict[str, float]] = [defaultdict(float) for _ in range(width)]
    for span in spans:
        if span["lane"] != lane or span["end_s"] <= start_s:
            continue
        first = max(0, int((span["start_s"] - start_s) / cell_s))
        last = min(width - 1, int((span["end_s"] - start_s) / cell_s))
        for cell in range(first, last + 1):
            cell_start_s = start_s + cell * cell_s
            overlap_s = min(span["end_s"], cell_start_s + cell_s) - max(span["start_s"], cell_start_s)
            if overlap_s > 0:
                seconds[cell][span["what"]] += overlap_s
    text = Text(no_wrap=True)
    for by_activity in seconds:
        longest, _ = max(by_activity.items(), key=itemgetter(1), default=("", 0.0))
        character, colour = glyph(longest) if longest else (" ", "")
        text.append(character, style=colour)
    return text


def legend() -> Text:
    """Every character with its meaning."""
    entries = [Text.assemble((character, colour), f" {what}") for what, (character, colour) in GLYPHS.items()]
    return Text("  ", no_wrap=True).join(entries)
