"""Curves made of characters."""

from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.observe.terminal.curve import plot_lines, plot_text, sparkline

BLANK = "\u2800"


def test_a_sparkline_rises_with_its_values_and_shows_the_last_ones() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([9.0, 0.0, 1.0], 2) == "▁█"


def test_a_missing_value_is_a_blank_and_nothing_is_nothing() -> None:
    assert sparkline([0.0, None, float("nan"), 1.0], 10) == "▁  █"
    assert sparkline([], 10) == sparkline([None], 10) == sparkline([1.0], 0) == ""


def test_a_rising_curve_begins_at_the_bottom_left_and_ends_at_the_top_right() -> None:
    lines = plot_lines([0.0, 0.25, 0.5, 0.75, 1.0], width=40, height=4)
    assert lines[0].startswith("1 ┤" + BLANK) and not lines[0].endswith(BLANK)
    assert not lines[3].startswith("0 ┤" + BLANK) and lines[3].endswith(BLANK)
    assert lines[4].split() == ["step", "1", "5"]


@given(
    values=st.lists(st.none() | st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=50),
    width=st.integers(1, 100),
    height=st.integers(1, 12),
)
def test_any_values_fit_the_asked_size(values: list[float | None], width: int, height: int) -> None:
    lines = plot_lines(values, width, height)
    assert lines == [] or len(lines) == height + 1
    assert all(len(line) <= width for line in lines)
    assert len(sparkline(values, width)) <= width


def test_the_text_for_rich_holds_title_and_curve() -> None:
    text = plot_text("accuracy", [0.1, 0.9], width=30, height=3).plain
    assert text.splitlines() == ["accuracy", *plot_lines([0.1, 0.9], 30, 3)]
