"""`python -m polyrhythm` and the command `polyrhythm`."""

import contextlib
import os
import sys

from polyrhythm.cli.main import main


def run() -> None:
    """The command, then out: taking down an interpreter with torch in it takes seconds, and everything is written by then."""
    code = main()
    with contextlib.suppress(OSError):  # nobody may be left to read
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
