"""Text from models, prompts and other machines, made safe and short for one line of a terminal."""

import unicodedata
from collections.abc import Iterable

from rich.cells import cell_len
from rich.text import Text

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


def flow(pieces: Iterable[str | Text], width: int, separator: str = ", ", start: Text | None = None) -> list[Text]:
    """Pieces one after another; one that does not fit goes to the next line, so that none is cut."""
    lines = [start.copy() if start else Text()]
    is_first = True
    for piece in pieces:
        text = Text(piece) if isinstance(piece, str) else piece
        if is_first:
            lines[-1].append_text(text)
        elif lines[-1].cell_len + len(separator) + text.cell_len <= width:
            lines[-1].append(separator).append_text(text)
        else:
            lines[-1].append(separator.rstrip())
            lines.append(text.copy())
        is_first = False
    return lines


def wrap(text: str, width: int, max_lines: int) -> list[str]:
    """Foreign text in lines broken at blanks; what is too long for them ends with an ellipsis."""
    words, lines = visible(text[:MAX_CHARS]).split(" "), [""]
    for place, word in enumerate(words):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(joined) <= width:
            lines[-1] = joined
        elif len(lines) == max_lines or not lines[-1]:
            return [*lines[:-1], first_cells(" ".join([lines[-1], *words[place:]]).lstrip(), width)]
        else:
            lines.append(first_cells(word, width))
    return lines


def _take_cells(text: str, width: int) -> str:
    used = 0
    for place, character in enumerate(text):
        used += cell_len(character)
        if used > width:
            return text[:place]
    return text
