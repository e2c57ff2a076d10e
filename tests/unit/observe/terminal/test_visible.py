"""Text that was made by a model, on its way to a terminal."""

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from polyrhythm.observe.terminal.text import first_cells, last_cells, visible


def test_commands_to_the_terminal_become_visible_characters() -> None:
    assert visible("a\x1b[31mb\x07\r\u202e\u2028\ud800") == "a�[31mb�����"
    assert visible("one\r\ntwo\tthree") == "one⏎two three"


@given(text=st.text(), width=st.integers(1, 30))
def test_both_ends_fit_and_are_printable(text: str, width: int) -> None:
    for short in (first_cells(text, width), last_cells(text, width)):
        assert cell_len(short) <= width
        assert "\x1b" not in short and "\n" not in short


def test_the_beginning_or_the_end_is_kept() -> None:
    assert first_cells("abcdef", 4) == "abc…"
    assert last_cells("abcdef", 4) == "…def"
    assert last_cells("日本語", 4) == "…語"
