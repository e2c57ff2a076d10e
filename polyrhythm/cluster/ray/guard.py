"""Run a command in a folder of its own for as long as the parent lives: `python guard.py FOLDER command …`.

The parent keeps our standard input open and never writes to it. When it ends, however it ends, the read returns, the
command's process group is killed (Ray would drain for half a minute) and the folder is removed. Standard library alone.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading


def main() -> int:
    folder, *command = sys.argv[1:]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def end_with_parent() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        _kill_group(process.pid)

    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: _kill_group(process.pid))
    returncode = process.wait()
    _kill_group(process.pid)  # what is left of it
    shutil.rmtree(folder, ignore_errors=True)
    return abs(returncode)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
