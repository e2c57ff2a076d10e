"""Text from models, prompts and other machines, made safe and short for one line of a terminal."""

import unicodedata

from rich.cells import cell_len

# Controls, formatting such as bidirectional overrides, surrogates, private use, line and paragraph separators.
HIDDEN_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
MAX_CHARS = 4000


def visible(text: str) -> str:
    """One line in which every character is visible and none commands the terminal."""
    text = text.replace("\r\n", "\n").replace("\n", "⏎").replace("\t", " ")
    return "".join("�" if unicodedata.category(character) in HIDDEN_CATEGORIES else character for character in text)


def first_cells(text: str, width: int) -> str:
    """The visible beginning of the text in at most `width` terminal cells."""
    text = visible(text[:MAX_CHARS])
    return text if cell_len(text) <= width else _take_cells(text, width - 1) + "…"


def last_cells(text: str, width: int) -> str:
    """The visible end of the text in at most `width` terminal cells."""
    text = visible(text[-MAX_CHARS:])
    return text if cell_len(text) <= width else "…" + _take_cells(text[::-1], width - 1)[::-1]


def _take_cells(text: str, width: int) -> str:
    used = 0
    for place, character in enumerate(text):
        used += cell_len(character)
        if used > width:
            return text[:place]
    return text
