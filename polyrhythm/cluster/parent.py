"""A child process ends when its parent does, however the parent ended.

The parent keeps the other end of the child's standard input open and never writes to it; when the parent is gone, even by
SIGKILL, reading returns and the child leaves.
"""

import os
import sys
import threading

LIFELINE = "POLYRHYTHM_LIFELINE"


def leave_with_parent() -> None:
    if os.environ.pop(LIFELINE, "") == "stdin":
        threading.Thread(target=_leave_when_closed, name="lifeline", daemon=True).start()


def _leave_when_closed() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(3)
