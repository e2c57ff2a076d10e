"""What a worker tells about a reward that raised: one line for the screen, the traceback for the log."""

import traceback
from pathlib import Path

from polyrhythm.rewards.sandbox.frames import RewardFailure

MAX_ERROR_CHARS = 500
MAX_TRACEBACK_CHARS = 8000
OWN_FILES = {str(Path(__file__).with_name(name)) for name in ("worker.py", "scoring.py", "calling.py")}


def failure_of(error: BaseException) -> RewardFailure:
    """What went wrong. An exception without a message, such as a bare assert, shows the line that raised it."""
    report = traceback.TracebackException.from_exception(error)
    frames = list(report.stack)
    while frames and frames[0].filename in OWN_FILES:
        del frames[0]
    said = "".join(report.format_exception_only()).strip()
    if not frames:  # what the function returned is wrong, or the way it was called
        return RewardFailure(_plain(said[:MAX_ERROR_CHARS]), origin=type(error).__name__)
    report.stack = traceback.StackSummary.from_list(frames)
    last = frames[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    if not str(error):
        said = f"{said}: {last.line}"
    return RewardFailure(
        error=_plain(f"{said[:MAX_ERROR_CHARS]} ({place})"),
        traceback=_plain("".join(report.format())[-MAX_TRACEBACK_CHARS:].rstrip()),
        origin=_plain(f"{type(error).__name__} {last.filename}:{last.lineno}"),
    )


def _plain(text: str) -> str:
    """Text that can be sent: half a character of a model becomes a question mark."""
    return text.encode(errors="replace").decode()
