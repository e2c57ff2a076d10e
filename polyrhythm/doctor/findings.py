"""What a check has found: a line for the user, a fix if there is one, and numbers for whoever reads doctor.json."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    about: str
    state: Literal["ok", "warning", "problem"]
    text: str
    fix: str = ""
    numbers: dict[str, Any] = {}


Check = Callable[[], Iterable[Finding]]


def findings_of(about: str, check: Check) -> Iterator[Finding]:
    """Those of one check; a check that fails has found something too."""
    try:
        yield from check()
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        yield Finding(about, "problem", f"the check itself failed: {type(error).__name__}: {first}", "report this")


def in_words(finding: Finding) -> str:
    line = f"{finding.state:<8} {finding.about:<14} {finding.text}"
    return f"{line}\n{'':<24}fix: {finding.fix}" if finding.fix else line
