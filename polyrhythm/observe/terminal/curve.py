"""Curves made of characters."""

import itertools
import math
from collections.abc import Sequence
from typing import TypeGuard

from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
MIN_COLUMNS = 16
BRAILLE_BLANK = 0x2800
# The bit of each of the 2 x 4 dots of a braille character, by column and by row from the top.
BRAILLE_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last `width` values as bars between their smallest and largest; a missing value is a blank."""
    recent = values[-width:] if width > 0 else []
    known = [value for value in recent if _is_number(value)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    return "".join(_bar((value - low) / span if span else 0.5) if _is_number(value) else " " for value in recent)


def plot_lines(values: Sequence[float | None], width: int = 72, height: int = 8, first_step: int = 1) -> list[str]:
    """The curve over the steps, with its largest and smallest value at the left and the steps below."""
    points = [(step, value) for step, value in enumerate(values) if _is_number(value)]
    if not points or height < 2:
        return []
    low, high = _limits([value for _, value in points])
    labels = [f"{high:.3g}", f"{low:.3g}"]
    margin = max(map(len, labels))
    num_columns = width - margin - 2
    if num_columns < MIN_COLUMNS:
        return []
    cells = _draw(points, len(values), low, high, num_columns, height)
    lines = []
    for row in range(height):
        label = labels[0] if row == 0 else labels[1] if row == height - 1 else ""
        lines.append(f"{label:>{margin}} ┤" + "".join(map(chr, cells[row])))
    first, last = f"step {first_step}", str(first_step + len(values) - 1)
    lines.append(" " * (margin + 2) + first + last.rjust(num_columns - len(first)))
    return lines


def plot_text(title: str, values: Sequence[float | None], width: int = 72, height: int = 8) -> Text:
    """The same with a title, for rich."""
    return Text("\n").join(
        [Text(title, style="bold"), Text("\n".join(plot_lines(values, width, height)), style="cyan")]
    )


def _draw(
    points: list[tuple[int, float]], num_values: int, low: float, high: float, num_columns: int, height: int
) -> list[list[int]]:
    """Braille cells in which neighbouring points are joined by a line."""
    cells = [[BRAILLE_BLANK] * num_columns for _ in range(height)]
    last_x, last_y = num_columns * 2 - 1, height * 4 - 1

    def dot(x: float, y: float) -> None:
        column, row = round(x), last_y - round(y)
        cells[row // 4][column // 2] |= BRAILLE_DOTS[column % 2][row % 4]

    placed = [(step / max(1, num_values - 1) * last_x, (value - low) / (high - low) * last_y) for step, value in points]
    dot(*placed[0])
    for (x0, y0), (x1, y1) in itertools.pairwise(placed):
        num_dots = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
        for part in range(1, num_dots + 1):
            dot(x0 + (x1 - x0) * part / num_dots, y0 + (y1 - y0) * part / num_dots)
    return cells


def _limits(values: list[float]) -> tuple[float, float]:
    """The whole of 0 to 1 for what lies inside it, such as an accuracy; otherwise the extremes."""
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    margin = 0.0 if high > low else max(1.0, abs(low))
    return low - margin, high + margin


def _bar(height: float) -> str:
    return BARS[min(len(BARS) - 1, int(height * len(BARS)))]


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
