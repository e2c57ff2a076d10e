"""What an actor does on its node: it starts one process of a run, passes on what it writes, and ends with it. Without Ray."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TypedDict

from polyrhythm.cluster.cores import process_environment
from polyrhythm.cluster.local_processes import ANNOUNCED_TO, PARENT_WATCHED
from polyrhythm.cluster.ray.command import PYTHON, TOKEN_FILE
from polyrhythm.devices import DEVICE_VARIABLE
from polyrhythm.devices.plan import VISIBLE_VARIABLES

DEVICE_KINDS = {"GPU": "cuda", "NPU": "npu"}
"""How Ray calls the accelerators that we know."""
MAX_UNREAD = 4 * 2**20
LAST_WORDS_S = 1.0


class News(TypedDict):
    """What has happened since the last time."""

    written: bytes
    url: str
    returncode: int | None


class NodeProcess:
    """One process in a session of its own. It sees the end of this one by its standard input, and then leaves."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._changed = threading.Condition()
        self._unread = bytearray()
        self._url = ""
        self._is_url_new = False
        self._returncode: int | None = None

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        num_threads: int,
        credentials: bytes,
        accelerators: Mapping[str, Sequence[str]],
        folder: str,
    ) -> int:
        """Its pid. The credentials are in a file of memory that nobody else can open, and that ends with the process."""
        token = _file_in_memory(credentials)
        announced, announce = os.pipe()
        places = {PYTHON: sys.executable or "python3", TOKEN_FILE: f"/proc/self/fd/{token}"}
        ours = {ANNOUNCED_TO: str(announce), PARENT_WATCHED: "stdin"}
        variables = {**own_environment(num_threads), **environment, **device_environment(accelerators), **ours}
        try:
            process = subprocess.Popen(
                [places.get(part, part) for part in command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables,
                start_new_session=True, pass_fds=(token, announce), cwd=folder if os.path.isdir(folder) else None,
            )  # fmt: skip
        finally:
            os.close(token)
            os.close(announce)
        self._process = process
        readers = [
            threading.Thread(target=self._read_output, args=(process,), daemon=True),
            threading.Thread(target=self._read_url, args=(announced,), daemon=True),
        ]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._wait_for_end, args=(process, readers), daemon=True).start()
        return process.pid

    def news(self, wait_s: float) -> News:
        """As soon as there are any, or after `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._unread or self._is_url_new or self._returncode is not None, wait_s)
            written, self._unread, self._is_url_new = bytes(self._unread), bytearray(), False
            return News(written=written, url=self._url, returncode=self._returncode)

    def signal(self, number: int) -> None:
        """SIGKILL is for all that it has started, too."""
        if self._process is None or self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def _read_output(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        while written := os.read(process.stdout.fileno(), 65536):
            with self._changed:
                self._unread += written
                del self._unread[:-MAX_UNREAD]  # nobody has asked for long: the last words count
                self._changed.notify_all()

    def _read_url(self, announced: int) -> None:
        with open(announced, "rb") as pipe:
            url = pipe.read().decode()
        with self._changed:
            self._url, self._is_url_new = url, True
            self._changed.notify_all()

    def _wait_for_end(self, process: subprocess.Popen[bytes], readers: Sequence[threading.Thread]) -> None:
        returncode = process.wait()
        for reader in readers:
            reader.join(LAST_WORDS_S)  # a child of the process may hold its end of a pipe open
        with self._changed:
            self._returncode = returncode
            self._changed.notify_all()


def own_environment(num_threads: int) -> dict[str, str]:
    """That of the node, without what Ray has put into it for its worker."""
    hidden = ("RAY_", *VISIBLE_VARIABLES.values())
    return {name: value for name, value in process_environment(num_threads).items() if not name.startswith(hidden)}


def device_environment(accelerators: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The devices that Ray has assigned, told in our own way; none is the CPU."""
    for resource, kind in DEVICE_KINDS.items():
        if given := accelerators.get(resource):
            return {DEVICE_VARIABLE: kind, VISIBLE_VARIABLES[kind]: ",".join(given)}
    return {DEVICE_VARIABLE: "cpu"} | dict.fromkeys(VISIBLE_VARIABLES.values(), "")


def _file_in_memory(content: bytes) -> int:
    descriptor = os.memfd_create("polyrhythm-token")
    os.fchmod(descriptor, 0o600)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return descriptor
