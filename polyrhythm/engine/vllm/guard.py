"""Run a command and all that it starts for as long as the parent lives: `python guard.py command …`.

The parent keeps our standard input open and never writes to it. When it ends, however it ends, the read returns and the
command's whole process group is killed: vLLM's own processes outlive one another otherwise. Standard library alone.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

FAILED_EXIT_CODE = 1


def main() -> int:
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def end_with_parent() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        _kill_group(process.pid)

    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: _kill_group(process.pid))
    returncode = process.wait()
    _kill_group(process.pid)  # what is left of the group
    return returncode if returncode >= 0 else FAILED_EXIT_CODE


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
